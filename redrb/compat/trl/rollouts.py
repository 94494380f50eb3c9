"""`TaskRollouts`: a `rollout_func` and callback that feed TRL's GRPOTrainer from a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from accelerate import DistributedType
from transformers import TrainerCallback

from redrb.checks import check_choice, checked_int
from redrb.compat.trl.held_leases import HeldLeases
from redrb.compat.trl.token_rows import TokenRow, check_group_size, token_row
from redrb.connection.deadline import checked_timeout
from redrb.errors import ConfigError, RecordError
from redrb.experience import BufferItem
from redrb.scopes import Entered
from redrb.stream import ExperienceStream, Lease
from redrb.train.fresh_batches import log_rejected
from redrb.weights import WeightPublisher

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""Their weights are gathered by a collective operation of all ranks."""

_NEEDED = ("use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode")


class NoEngine:
    """Takes the place of TRL's vLLM client: makers generate, so there is nothing to update."""

    def sync_weights(self) -> None:
        """Do nothing: TRL calls this before each generation."""


def correct_for_makers(trainer: Any) -> None:
    """Let a GRPOTrainer weigh its loss by the ratios of its policy to the makers' policy.

    TRL computes these ratios from the `logprobs` of a `rollout_func` only if `use_vllm` is set,
    and ignores the log-probabilities otherwise. With `use_vllm=True` in the GRPOConfig it would
    connect to vLLM, so this sets the attribute of the trainer instead. The options
    `vllm_importance_sampling_*` of the GRPOConfig hold; with
    `vllm_importance_sampling_correction=False` nothing is changed.
    """
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"{type(trainer).__name__} has no {', '.join(missing)}: redrb.compat.trl is for the "
            "GRPOTrainer of TRL 1.16."
        )
    if trainer.use_vllm or not trainer.vllm_importance_sampling_correction:
        return
    trainer.use_vllm = True
    trainer.vllm_generation = NoEngine()
    trainer._last_loaded_step = -1  # noqa: SLF001 (TRL compares it before it calls sync_weights)


class Publishing:
    """Publishes a trainer's policy: full weights, or only the adapter of a PEFT model."""

    def __init__(self, publisher: WeightPublisher | None, every: int) -> None:
        if not isinstance(publisher, WeightPublisher | None):
            raise ConfigError(f"publisher={publisher!r:.80}: give a redrb.WeightPublisher or None.")
        self._publisher = publisher
        self.every = every
        self._published_at = 0

    def after_step(self, trainer: Any, step: int) -> None:
        """Publish if a version is due after optimizer step `step`."""
        if step - self._published_at >= self.every:
            self._published_at = step
            self.publish(trainer)

    def publish(self, trainer: Any) -> None:
        """Publish the policy now; all ranks call it, as sharded weights are gathered."""
        accelerator = trainer.accelerator
        if self._publisher is None:
            if accelerator.distributed_type in _SHARDED:
                accelerator.get_state_dict(trainer.model)
            return
        model = accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            if accelerator.distributed_type in _SHARDED:
                raise ConfigError(
                    "an adapter that is sharded over ranks cannot be published: train it with DDP, "
                    "or without PEFT."
                )
            self._publisher.publish_lora(model)
        else:
            self._publisher.publish(accelerator.get_state_dict(trainer.model))


Acknowledge = Literal["step", "save"]

_RESERVED = frozenset(
    (
        "prompt prompts completion completions completion_ids prompt_ids logprobs "
        "logprob_token_ids env_mask reward policy_version trainer_state log_extra log_metric "
        "environments image images"
    ).split()
)


def placeholder_prompts(groups: int) -> Any:
    """Return a dataset for `train_dataset`: one row stands for one group of a task.

    TRL's trainers need a dataset and count epochs by it. The makers choose the real prompts.

    Args:
        groups: Rows of the dataset.
    """
    from datasets import Dataset

    rows = checked_int("groups", groups, 1)
    return Dataset.from_dict({"prompt": ["(the prompt is in the task)"] * rows})


def maker_reward(completions: Sequence[Any], **fields: Any) -> list[float | None]:
    """Return the reward that the maker gave each completion; a reward function of GRPOTrainer.

    Raises:
        ConfigError: The completions do not come from `TaskRollouts`.
    """
    rewards = fields.get("reward")
    if rewards is None or len(rewards) != len(completions):
        raise ConfigError(
            "maker_reward needs the rewards of a task: give GRPOTrainer a TaskRollouts as "
            "rollout_func, and placeholder_prompts() as train_dataset."
        )
    return list(rewards)


class TaskRollouts(TrainerCallback, Entered):  # type: ignore[misc]
    """Feeds a GRPOTrainer with groups of a task; give it as `rollout_func` and in `callbacks`.

    Each call takes as many groups as the trainer asks for prompts. Groups are acknowledged after
    the optimizer step that has trained the last of them: if the process dies before, they are
    requeued. The trainer's prompts only say how many groups to take; the makers choose the prompts.
    In a task with `max_staleness` the first call says how many groups a version trains, so that
    makers get the rights to begin them.

    Args:
        stream: The stream of the task. Its groups have `num_generations` samples each.
        publisher: Publishes the policy for the makers; on several ranks only rank 0 has one. None:
            nothing is published.
        publish_every: Fewest optimizer steps between two versions, the same on all ranks. A version
            is published when all groups that were taken are trained, so that the bound of staleness
            counts what makers can reach.
        extras: Names of the samples' extras that reward functions get as keyword arguments, beside
            `reward` and `policy_version`.
        acknowledge: "step": after the optimizer step; "save": after the checkpoint that holds the
            step, so that a trainer that resumes there trains every group.
        timeout: Seconds to wait for the groups of a step; None waits for ever.

    Examples:
        >>> with TaskRollouts(stream, publisher=publisher) as rollouts:
        ...     GRPOTrainer(
        ...         model, maker_reward, args, train_dataset=placeholder_prompts(1000),
        ...         rollout_func=rollouts, callbacks=[rollouts],
        ...     ).train()
    """

    def __init__(
        self,
        stream: ExperienceStream,
        *,
        publisher: WeightPublisher | None = None,
        publish_every: int = 1,
        extras: Sequence[str] = (),
        acknowledge: Acknowledge = "step",
        timeout: float | None = 600.0,
    ) -> None:
        if not isinstance(stream, ExperienceStream):
            raise ConfigError(f"stream={stream!r:.80}: give a redrb.ExperienceStream.")
        check_choice("acknowledge", acknowledge, get_args(Acknowledge))
        self._stream = stream
        if isinstance(extras, str) or not all(isinstance(name, str) for name in extras):
            raise ConfigError(f"extras={extras!r:.80}: give a sequence of names.")
        reserved = sorted(_RESERVED & set(extras))
        if reserved:
            raise ConfigError(
                f"extras {', '.join(reserved)}: TRL uses these names itself; put the values under "
                "other names."
            )
        self._extras = tuple(extras)
        self._at_save = acknowledge == "save"
        self._timeout = checked_timeout(timeout)
        self._publishing = Publishing(publisher, checked_int("publish_every", publish_every, 1))
        self._trainer: Any = None
        self._leases = HeldLeases()
        self._passes = 0  # forward passes of this process that are trained
        self._trained_at = 0  # passes after which all groups that were taken are trained
        self._rank_step = 0  # takes of this process

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._leases.end(error)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Take the groups for `prompts`, and return them as TRL's `rollout_func` must.

        Raises:
            ConfigError: The trainer evaluates, its batches split groups, or this object is not
                among its callbacks.
            RecordError: A group has another size than `num_generations`: a failed delivery. With
                several ranks, also when samples lack tokens or log-probabilities.
            BatchTimeout: Too few groups came in time.
        """
        self._attach(trainer, len(prompts))
        groups = self._groups_of(len(prompts), trainer)
        lease, samples, rows = self._trainable(groups, trainer)
        trained = [[int(chosen) for chosen in row.trained] for row in rows]
        self._trained_at = self._passes + _passes(trainer)
        self._leases.hold(lease, self._trained_at)
        return {
            "prompt_ids": [row.prompt for row in rows],
            "completion_ids": [row.completion for row in rows],
            "logprobs": [row.log_probs for row in rows],
            **({} if all(map(all, trained)) else {"env_mask": trained}),
            **self._fields(samples),
        }

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Count a forward pass that did not end with an optimizer step."""
        self._passes += 1

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Acknowledge trained groups, and publish the policy."""
        self._passes += 1
        if not self._at_save:
            self._leases.acknowledge(self._passes)
        if self._trainer is not None and self._passes >= self._trained_at:
            self._publishing.after_step(self._trainer, state.global_step)

    def on_save(self, *_: Any, **__: Any) -> None:
        """Acknowledge the groups that the checkpoint has trained."""
        self._leases.acknowledge(self._passes)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Requeue groups that were taken and not trained, or not saved."""
        self._leases.end()

    def _attach(self, trainer: Any, prompts: int) -> None:
        if not trainer.model.training:
            raise ConfigError(
                "GRPOTrainer evaluates with the same rollout_func, which would take groups for "
                'training: use eval_strategy="no", and evaluate the published weights elsewhere.'
            )
        if self not in trainer.callback_handler.callbacks:
            raise ConfigError(
                "groups would never be acknowledged: give the same TaskRollouts in callbacks=[...]."
            )
        if self._trainer is not trainer:
            self._trainer = trainer
            correct_for_makers(trainer)
            self._stream.expect(self._groups_per_version(trainer, prompts))
            self._publishing.publish(trainer)

    def _groups_per_version(self, trainer: Any, prompts: int) -> int:
        """Return the groups that are trained between two versions, of which none is split."""
        step, passes = trainer.args.gradient_accumulation_steps, _passes(trainer)
        steps = self._publishing.every
        while steps * step % passes:
            steps += 1
        groups = prompts * trainer.accelerator.num_processes // trainer.num_generations
        return max(1, int(groups * steps * step // passes))

    def _groups_of(self, prompts: int, trainer: Any) -> int:
        size = trainer.num_generations
        if prompts % size:
            raise ConfigError(
                f"this process generates {prompts} samples at a time, which is no multiple of "
                f"num_generations={size}: groups are not split over ranks. Make "
                "per_device_train_batch_size * steps_per_generation a multiple of it."
            )
        return int(prompts // size)

    def _take(self, groups: int, trainer: Any) -> Lease:
        ranks = trainer.accelerator.num_processes
        if ranks == 1:
            return self._stream.take(groups, timeout=self._timeout)
        lease = self._stream.take(
            groups * ranks,
            timeout=self._timeout,
            rank=trainer.accelerator.process_index,
            world_size=ranks,
            step=self._rank_step,
        )
        self._rank_step += 1
        return lease

    def _trainable(
        self, groups: int, trainer: Any
    ) -> tuple[Lease, list[BufferItem], list[TokenRow]]:
        """Take groups until TRL can train all of them; those without tokens are dead letters."""
        while True:
            lease = self._take(groups, trainer)
            try:
                return lease, *_rows(lease, trainer.num_generations)
            except RecordError as error:
                if lease:
                    lease.release()
                if error.field is None or trainer.accelerator.num_processes > 1:
                    raise
                log_rejected(error, self._stream.task, groups)

    def _fields(self, samples: Sequence[BufferItem]) -> dict[str, list[Any]]:
        return {
            "reward": [None if each.reward is None else float(each.reward) for each in samples],
            "policy_version": [each.policy_version for each in samples],
            **{name: [each.extras.get(name) for each in samples] for name in self._extras},
        }


def _rows(lease: Lease, size: int) -> tuple[list[BufferItem], list[TokenRow]]:
    """Decode the groups; reject those that have a fault, and raise RecordError."""
    samples, rows = [], []
    faults: dict[int, RecordError] = {}
    for seq, group in zip(lease.ids, lease.groups(), strict=True):
        try:
            check_group_size(group, size)
            rows += [token_row(item) for item in group]
        except RecordError as error:
            if error.field is None:
                error.ids = (seq,)
                lease.fail(error, [seq])
                raise
            faults[seq] = error
        samples += group
    if faults:
        for seq, fault in faults.items():
            lease.reject(fault, [seq])
        first = next(iter(faults.values()))
        first.ids = tuple(faults)
        raise first
    return samples, rows


def _passes(trainer: Any) -> int:
    """Return the forward passes of one process that train what it generates at a time."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)
