"""ColossalAI's makers: `ExperienceMakerHolder`, and `GRPOMakerHolder` for groups of completions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from redrb.algorithms import GRPOExperienceMaker, NaiveExperienceMaker
from redrb.compat.coati.performance import ExperienceMakerPerformanceEvaluator, parameters_of
from redrb.compat.coati.updates import ChunkedUpdates
from redrb.connection import Client
from redrb.connection.connecting import client_for
from redrb.connection.stop import STOP_TIMEOUT_S, Stop, checked_stop_seconds
from redrb.errors import ConfigError
from redrb.experience import Experience
from redrb.keys import check_name
from redrb.train.callbacks import MakerCallback, MakerEvents, refuse_hooks
from redrb.train.following import MakerWeights
from redrb.train.maker import ExperienceMaker, Maker, maker_stream
from redrb.train.rights import rows_of
from redrb.train.strategy import Strategy, place_models
from redrb.words import counted

_log = logging.getLogger("redrb")


def prompt_batches(
    dataloader_fn: Callable[[], Iterable[Any]], epochs: int, steps: int
) -> Iterator[Any]:
    """Yield batches of prompts; no batch is drawn from the loader without being yielded.

    Args:
        dataloader_fn: Returns the loader; it is called once.
        steps: Number of batches, over as many passes as they need; 0: `epochs` passes.

    Raises:
        ConfigError: `steps` is above 0, and the loader has no batch; or another pass is needed over
            an iterator, which yields its batches once.
    """
    done, loader = 0, dataloader_fn()
    if steps <= 0 and epochs > 1:
        _check_repeatable(loader)
    for _ in iter(int, 1) if steps > 0 else range(epochs):
        before = done
        for batch in loader:
            yield batch
            done += 1
            if done == steps:
                return
        if steps > 0 and done == before:
            raise ConfigError("dataloader_fn returned a loader without a single batch.")
        if steps > 0:
            _check_repeatable(loader)


def _check_repeatable(loader: Iterable[Any]) -> None:
    if isinstance(loader, Iterator):
        raise ConfigError(
            f"dataloader_fn returned a {type(loader).__name__}, which yields its batches once, and "
            "it is called once for all passes: return a DataLoader, a list, or another object that "
            "can be iterated over again."
        )


def _log_samples(maker: str, event: str, **made: Any) -> None:  # noqa: ARG001
    _log.info("maker %r made %s", maker, counted(made["samples"], "sample"))


class ExperienceMakerHolder(Maker):
    """Makes experience in one process and sends it to any number of trainers.

    Source: `coati.ray.experience_maker_holder`. There it is a Ray actor; here it is an object in
    any process. Trainers and makers find each other by name in Redis. Weights change as a whole,
    between batches of prompts, or with `in_flight_updates` between tokens.

    In a task with `max_staleness` the loop asks for the right to begin each batch of prompts
    (`ExperienceStream.admit`), before it fetches weights for it, so that no group comes too late;
    if it gets fewer rights than there are prompts, it makes the batch in several parts, each with
    all hooks of a batch. docs/explanation/staleness-and-admission.md says more.

    Makers are elastic: a maker may join late, leave or die at any time, without any registration.
    A maker that no trainer names follows the weights of `follow`; as soon as a trainer names it, it
    follows that trainer. Each sample is stored once, and no trainer waits for a particular maker.
    While Redis is away, a maker goes on with its current weights until `max_unsent` groups wait, or
    the rights that it has are used up.
    Subclasses may override `build_experience_maker` and `models_to_follow`.

    Args:
        detached_trainer_name_list: Trainers that get the experience, sample by sample in turn; at
            least one.
        strategy_fn: Returns the strategy that places the models, such as `Strategy`.
        model_fn: Returns actor, critic, reward model and initial model; models that the experience
            maker does not use may be None.
        env_info: Values of LOCAL_RANK, RANK, WORLD_SIZE, MASTER_PORT and MASTER_ADDR for
            torch.distributed, by these names in lower case.
        sync_models_from_trainers: Wait for a trainer's weights before the first batch.
        buffer_cpu_offload: Copy experience to the CPU in the loop. Otherwise the sender's thread
            encodes it where it is, and its tensors must not change any more.
        kl_coef: Price of the divergence from the initial model.
        callbacks: Objects whose hooks are called while `workingloop` runs.
        eval_performance: Add an `ExperienceMakerPerformanceEvaluator`.
        debug: Log each batch of prompts.
        update_lora_weights: Accepted as in coati, without effect: each update says if it is LoRA.
        name: Name by which trainers name the maker; otherwise any name that no other maker has.
        client: Result of `redrb.connect`, or a URL; default: REDRB_URL.
        namespace: Keeps experiments on one server apart.
        follow: Trainer whose weights are taken while no trainer names the maker; default: the first
            of `detached_trainer_name_list`.
        weights_timeout: Seconds to wait for the first weights.
        stop_timeout: Seconds that `workingloop` and `close` may spend on Redis, both together,
            after SIGTERM or Ctrl-C. A batch that is being made is finished and does not count.
        room_timeout: Seconds for which a loop that was asked to end waits for room for its last
            groups; after that they are given up, and a warning counts them. Default and most: three
            quarters of `stop_timeout`.
        max_unsent: Most groups that were made and are not in Redis yet; the loop waits beyond it.
            In tasks that give rights these are the bound, which is why staleness is no reason to
            lower it.
        agree: Settings, by name and as texts, in which the trainer must agree with this maker. The
            maker takes no weights of a trainer that announces others (`DetachedTrainer(agree=)`):
            `workingloop` raises `ConfigError`, which names the settings that differ; at its start
            only after half a minute, because a trainer may just be starting with them.
        end_with_job: End `workingloop` when the trainer that the maker follows announces the end of
            the job (`DetachedTrainer.end_job`); of several trainers all must have done so.
        in_flight_updates: Fetch new weights while `workingloop` generates and swap them in between
            two tokens, as PipelineRL does; `token_versions` note which weights made each token. The
            experience maker gets the option `before_token`, to be called in the thread in which the
            experience maker was called.
        stream_options: Further options of `ExperienceStream`, such as `filters`.
        generate_kwargs: Options of generation, such as `max_length=512, top_k=50`; for the ready
            experience makers those of `redrb.algorithms.generate`.

    Raises:
        ConfigError: A name, number or option cannot be used.
        StoreUnavailable: Redis could not be reached.

    Examples:
        >>> maker = ExperienceMakerHolder(
        ...     ["trainer_0"],
        ...     strategy_fn=Strategy,
        ...     model_fn=lambda: (actor, critic, reward_model, initial_model),
        ...     sync_models_from_trainers=True,
        ...     max_length=512,
        ...     name="maker_0",
        ... )
        >>> maker.workingloop(lambda: dataloader, num_epochs=5)

    Attributes:
        experience_maker: The object that turns prompts into experience.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse hooks of coati that would not be called."""
        super().__init_subclass__(**options)
        refuse_hooks(cls, MakerCallback)

    def __init__(
        self,
        detached_trainer_name_list: Sequence[str],
        strategy_fn: Callable[[], Strategy | None],
        model_fn: Callable[[], tuple[Any, Any, Any, Any]],
        env_info: Mapping[str, Any] | None = None,
        sync_models_from_trainers: bool = False,  # noqa: FBT001 (coati has these by position)
        buffer_cpu_offload: bool = True,  # noqa: FBT001
        kl_coef: float = 0.1,
        callbacks: Sequence[MakerCallback] = (),
        eval_performance: bool = False,  # noqa: FBT001
        debug: bool = False,  # noqa: FBT001
        update_lora_weights: bool = False,  # noqa: FBT001, ARG002
        *,
        name: str = "maker_0",
        client: Client | str | None = None,
        namespace: str = "default",
        follow: str | None = None,
        weights_timeout: float = 600.0,
        stop_timeout: float = STOP_TIMEOUT_S,
        room_timeout: float | None = None,
        max_unsent: int = 256,
        agree: Mapping[str, str] | None = None,
        end_with_job: bool = True,
        in_flight_updates: bool = False,
        stream_options: Mapping[str, Any] | None = None,
        **generate_kwargs: Any,
    ) -> None:
        names, options = detached_trainer_name_list, stream_options or {}
        stop_s = checked_stop_seconds("stop_timeout", stop_timeout)
        room_s = 0.75 * stop_s
        if room_timeout is not None:
            room_s = min(room_s, checked_stop_seconds("room_timeout", room_timeout))
        if isinstance(names, str) or not names:
            raise ConfigError(
                "detached_trainer_name_list is a list of at least one trainer's name."
            )
        for trainer in names:
            check_name("trainer", trainer)
        self.name = check_name("maker", name)
        opened, self._client_scope = client_for(client)
        with ExitStack() as undo:
            undo.push(self._client_scope)
            streams = []
            for task in names:
                streams.append(maker_stream(opened, task, name, namespace=namespace, **options))
                undo.callback(streams[-1].close)
            models, _ = place_models(strategy_fn, model_fn, env_info)
            actor, critic, reward_model, initial_model = models
            maker = self.build_experience_maker(actor, critic, reward_model, initial_model, kl_coef)
            weights = MakerWeights(
                opened,
                namespace,
                name,
                self.models_to_follow(actor, critic),
                Stop(stop_s),
                follow=follow or names[0],
                wait_for_first=sync_models_from_trainers,
                first_timeout=weights_timeout,
                in_flight=in_flight_updates,
                agree=agree,
            )
            self._updates = ChunkedUpdates(weights.models)
            measures: list[MakerCallback] = []
            if eval_performance:
                of_actor, of_critic, of_reward, of_initial = map(parameters_of, models)
                measures.append(
                    ExperienceMakerPerformanceEvaluator(of_actor, of_critic, of_initial, of_reward)
                )
            if debug:
                measures.append(MakerEvents(partial(_log_samples, name)))
            super().__init__(
                streams,
                maker,
                weights,
                room_timeout=room_s,
                callbacks=[*callbacks, *measures],
                generate_kwargs=generate_kwargs,
                max_unsent=max_unsent,
                offload=buffer_cpu_offload,
                end_with_job=end_with_job,
            )
            undo.pop_all()

    def build_experience_maker(
        self,
        actor: Any,
        critic: Any,
        reward_model: Any,
        initial_model: Any,
        kl_coef: float,
    ) -> ExperienceMaker:
        """Return the maker of experience; override it for another algorithm."""
        return NaiveExperienceMaker(actor, critic, reward_model, initial_model, kl_coef)

    def models_to_follow(self, actor: Any, critic: Any) -> dict[str, Any]:
        """Return the models that get the trainers' weights, by the names that these give them."""
        return {"actor": actor, "critic": critic}

    def workingloop(
        self,
        dataloader_fn: Callable[[], Iterable[Any]],
        num_epochs: int = 1,
        num_steps: int = 0,
    ) -> None:
        """Make experience of every batch of prompts, each with the newest weights.

        SIGTERM, Ctrl-C, `stop` and the end of the job end the loop after the current batch, when
        all groups are sent or have found no room within `room_timeout`.

        Args:
            dataloader_fn: Called once; returns the batches of prompts, which are tensors or dicts
                of tensors, whose further keys may be lists with an entry for each prompt; or lists
                of prompts, for experience makers that take them. Each pass iterates over this
                loader again.
            num_epochs: Passes over the loader.
            num_steps: Number of batches, over as many passes as they need; 0: `num_epochs`.

        Raises:
            WeightTimeout: No weights came in time.
            WeightMismatch: The first weights do not fit the models. Later ones are logged, and the
                models keep theirs.
            ConfigError: There are several passes over an iterator, which yields its batches once;
                or the trainer has other settings than `agree`.
            RecordError: A batch is neither a tensor, a dict of tensors nor a list.
            SendFailed: Groups could not be sent; the error counts them and names the cause. The
                newest batch was then sent as well, unless a note of the error denies it.
        """
        self._run(prompt_batches(dataloader_fn, num_epochs, num_steps))

    def make_experience(self, inputs: Any) -> Experience:
        """Return the experience of a batch of prompts, made with the current weights.

        Raises:
            RecordError: The batch is neither a tensor, a dict of tensors nor a list.
        """
        rows_of(inputs)
        version, options = self._begin_batch()
        experience = self.experience_maker.make_experience(inputs, **options)
        self._note(experience, version)
        return experience

    def _parts(self, inputs: Any) -> Iterator[Experience]:
        """Let a subclass that overrides `make_experience` make the whole batch."""
        own = getattr(self.make_experience, "__func__", None)
        if own is ExperienceMakerHolder.make_experience:
            yield from super()._parts(inputs)
        else:
            version = self._weights.version
            experience = self.make_experience(inputs)
            self._note(experience, version)
            yield experience

    def update_experience_maker(
        self,
        new_actor_state_dict: Mapping[str, Tensor] | None = None,
        new_actor_lora_config_dict: Mapping[str, Any] | None = None,
        new_critic_state_dict: Mapping[str, Tensor] | None = None,
        new_critic_lora_config_dict: Mapping[str, Any] | None = None,
        fully_update: bool = False,  # noqa: FBT001 (coati has these by position)
        chunk_start: bool | None = None,  # noqa: FBT001
        chunk_end: bool | None = None,  # noqa: FBT001
    ) -> None:
        """Update the models from this process, in one call or in chunks.

        Updates of trainers in other processes need no such call. In chunks, as ColossalAI's trainer
        sends them: a call with `chunk_start` begins an update, calls with neither flag add tensors,
        and a call with `chunk_end` loads all tensors that the models have, under the model lock, so
        generation never sees half an update. The calls with a flag may hold tensors too. A call
        with neither flag outside of an update is an update by itself.

        If a call fails, the models keep their old weights, and the remaining calls of the update
        raise WeightError. All calls of an update must come from one thread.
        `on_make_experience_*` hold the lock, so callbacks update in other hooks.

        Args:
            new_actor_state_dict: Tensors of the actor by name; with LoRA `lora_A` and `lora_B`.
            new_actor_lora_config_dict: Settings of the actor's LoRA layers by name, such as
                `LoraConfig`; the product of A and B is then merged into the weights.
            new_critic_state_dict: The same for the critic.
            new_critic_lora_config_dict: The same for the critic.
            fully_update: The models are complete after this update; in chunks, the last call
                decides.
            chunk_start: The update begins with this call.
            chunk_end: The update ends with this call.

        Raises:
            WeightError: This thread has no update under way, or it makes experience just now.
            WeightMismatch: A tensor does not fit the models, which keep their old weights.
        """
        loras = {"actor": new_actor_lora_config_dict, "critic": new_critic_lora_config_dict}
        ended = self._updates.update(
            {"actor": new_actor_state_dict, "critic": new_critic_state_dict},
            dict.fromkeys(loras) if fully_update else loras,
            first=bool(chunk_start),
            last=bool(chunk_end),
        )
        if ended and fully_update:
            self._weights.initialised = True

    def close(self, *, timeout: float = 60.0) -> None:
        """Send the remaining groups; close the streams, and the client if it was opened here.

        Raises:
            SendFailed: Not all groups could be sent in time. If `workingloop` was asked to end and
                has waited for them already, a warning counts them instead.
        """
        with self._client_scope:
            super().close(timeout=timeout)


class GRPOMakerHolder(ExperienceMakerHolder):
    """Makes groups of completions of each prompt, each scored against its group.

    `model_fn` returns actor, None, reward model (or a function) and initial model (or None). Args
    are those of `ExperienceMakerHolder`, and:

    Args:
        group_size: Completions of each prompt.
    """

    def __init__(self, *args: Any, group_size: int = 8, **options: Any) -> None:
        self._group_size = group_size
        super().__init__(*args, **options)

    def build_experience_maker(
        self,
        actor: Any,
        critic: Any,  # noqa: ARG002
        reward_model: Any,
        initial_model: Any,
        kl_coef: float,  # noqa: ARG002 (the divergence is a term of the loss: `GRPOStep`'s beta)
    ) -> ExperienceMaker:
        """Return a `GRPOExperienceMaker`."""
        return GRPOExperienceMaker(actor, reward_model, initial_model, group_size=self._group_size)
