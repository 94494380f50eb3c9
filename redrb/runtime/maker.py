"""`ExperienceMakerHolder`: makes experience with the newest weights, and sends it to trainers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from redrb.algorithms import NaiveExperienceMaker
from redrb.connection import Client
from redrb.connection.stopping import Stop as Hurry
from redrb.connection.stopping import stoppable
from redrb.errors import (
    ConfigError,
    DecodeError,
    RecordError,
    StoreUnavailable,
    WeightError,
)
from redrb.experience import Experience
from redrb.keys import check_name
from redrb.runtime.callbacks import Callbacks, MakerCallback
from redrb.runtime.client import client_for
from redrb.runtime.following import WeightFollower
from redrb.runtime.graceful_sending import GracefulSender
from redrb.runtime.in_flight import InFlightUpdates
from redrb.runtime.model_updates import ModelUpdates
from redrb.runtime.models import parameters_of, set_environment
from redrb.runtime.performance import ExperienceMakerPerformanceEvaluator
from redrb.runtime.progress import Progress
from redrb.runtime.stopping import StopRequest
from redrb.runtime.strategy import Strategy
from redrb.stream import ExperienceStream
from redrb.stream.sending import ExperienceSender, GroupedRows
from redrb.stream.waiting import WARN_EVERY_S

_log = logging.getLogger("redrb")

_ONE_ATTEMPT = Hurry()
_ONE_ATTEMPT.ask()


class ExperienceMaker(Protocol):
    """What turns prompts into experience."""

    def make_experience(self, inputs: Any, **generate_kwargs: Any) -> Experience:
        """Return the experience of a batch of prompts."""


class ExperienceMakerHolder:
    """Makes experience in a process of its own, and sends it to any number of trainers.

    Source: `coati.ray.experience_maker_holder`. There it is a Ray actor; here it is an object in
    any process. Trainers find it by its name in Redis, and it finds the trainers' buffers by their
    names. Weights change between batches of prompts, or with `in_flight_updates` between tokens,
    and whole.

    Makers are elastic: one may join late, leave, or die at any time, and nobody has to know it
    before. A maker that no trainer names follows the weights of the first trainer of its list, or
    of `follow`; as soon as a trainer names it, it follows that one. What it sent is in Redis, each
    sample once, and no wait of a trainer depends on it. While Redis is away it goes on with the
    weights it has, until `max_unsent` groups wait to be sent.

    Example:
        >>> maker = ExperienceMakerHolder(
        ...     ["trainer_0"],
        ...     strategy_fn=redrb.Strategy,
        ...     model_fn=lambda: (actor, critic, reward_model, initial_model),
        ...     sync_models_from_trainers=True,
        ...     max_length=512,
        ...     name="maker_0",
        ... )
        >>> maker.workingloop(lambda: dataloader, num_epochs=5)

    Attributes:
        name: Name of the maker.
        experience_maker: What makes experience; of a subclass or the algorithm's own.
        policy_version: Version of the weights in its models; None before the first update.
        backpressure_s: Seconds that sending has held up the loop.
    """

    def __init__(
        self,
        detached_trainer_name_list: Sequence[str],
        strategy_fn: Callable[[], Strategy],
        model_fn: Callable[[], tuple[Any, Any, Any, Any]],
        env_info: Mapping[str, Any] | None = None,
        sync_models_from_trainers: bool = False,  # noqa: FBT001 (places of coati's, from here on)
        buffer_cpu_offload: bool = True,  # noqa: FBT001
        kl_coef: float = 0.1,
        callbacks: Sequence[MakerCallback] = (),
        eval_performance: bool = False,  # noqa: FBT001
        debug: bool = False,  # noqa: FBT001
        update_lora_weights: bool = False,  # noqa: FBT001, ARG002 (trainers say what they send)
        *,
        name: str = "maker_0",
        client: Client | str | None = None,
        namespace: str = "default",
        follow: str | None = None,
        update_timeout: float = 60.0,
        weights_timeout: float = 600.0,
        stop_timeout: float = 20.0,
        max_unsent: int = 256,
        in_flight_updates: bool = False,
        stream_options: Mapping[str, Any] | None = None,
        **generate_kwargs: Any,
    ) -> None:
        """Make the models and open the trainers' buffers.

        Args:
            detached_trainer_name_list: Trainers that get the experience, sample by sample in turn;
                at least one.
            strategy_fn: Returns how models are placed, such as `redrb.Strategy`.
            model_fn: Returns actor, critic, reward model and initial model; those that the
                experience maker does not use may be None.
            env_info: Values of the variables LOCAL_RANK, RANK, WORLD_SIZE, MASTER_PORT and
                MASTER_ADDR for torch.distributed, by their names in lower case.
            sync_models_from_trainers: Wait for a full update of the weights before the first batch.
            buffer_cpu_offload: Copy experience to the CPU in the loop; else it is encoded where it
                is, in the sender's thread, and nothing of it may change any more.
            kl_coef: Price of the divergence from the initial model.
            callbacks: Told what happens.
            eval_performance: Add an `ExperienceMakerPerformanceEvaluator`.
            debug: Log each batch of prompts.
            update_lora_weights: As in coati; whether an update is of LoRA is known from what comes.
            name: Name by which trainers name it; where none does, any that no other maker has.
            client: What `redrb.connect` returned, or a URL; default: REDRB_URL.
            namespace: Keeps experiments on one server apart.
            follow: Trainer whose weights it takes while no trainer names it; default: the first of
                `detached_trainer_name_list`.
            update_timeout: Seconds from one call of `update_experience_maker` to the next, until
                an update is dropped.
            weights_timeout: Seconds to wait for the first full update.
            stop_timeout: Seconds for which a loop that was asked to end waits for room for what it
                made; what finds none is given up, and logged.
            max_unsent: Most groups made and not in Redis yet; the loop waits then.
            in_flight_updates: While `workingloop` runs, fetch new weights beside generation, and
                change them between two tokens, as PipelineRL does; `token_versions` of samples say
                which weights made each token. The experience maker gets `before_token` among its
                options, to be called by the thread that it is called in.
            stream_options: Further options of `ExperienceStream`, such as `filters`.
            generate_kwargs: How completions are generated, such as `max_length=512, top_k=50`.

        Raises:
            ConfigError: A name, number or option is not usable.
            StoreUnavailable: Redis could not be reached.
        """
        targets = _targets(detached_trainer_name_list)
        self.name = check_name("maker", name)
        set_environment(env_info)
        strategy = strategy_fn() or Strategy()
        with strategy.model_init_context():
            actor, critic, reward_model, initial_model = model_fn()
        callbacks = list(callbacks)
        if eval_performance:
            numbers = map(parameters_of, (actor, critic, initial_model, reward_model))
            callbacks.append(ExperienceMakerPerformanceEvaluator(*numbers))
        self._callbacks = Callbacks(callbacks, MakerCallback)
        actor, critic, reward_model, initial_model = map(
            strategy.prepare, (actor, critic, reward_model, initial_model)
        )
        self.experience_maker = self.build_experience_maker(
            actor, critic, reward_model, initial_model, kl_coef
        )
        self.generate_kwargs = generate_kwargs
        self._debug = debug
        self._stop, self._hurry = StopRequest(), Hurry()
        self._away_told: float | None = None  # when it was logged that Redis is away
        self._updates = ModelUpdates({"actor": actor, "critic": critic}, timeout_s=update_timeout)
        self._initialised = not sync_models_from_trainers
        self._weights_timeout = weights_timeout
        self._client, self._owned = client_for(client)
        with ExitStack() as undo:
            undo.push(self._owned)
            self._follower = WeightFollower(
                self._client, namespace, name, self._updates, chosen=follow or targets[0]
            )
            self._in_flight = (
                InFlightUpdates(self._follower, self._updates) if in_flight_updates else None
            )
            options = dict(stream_options or {})
            self._streams = [
                ExperienceStream(self._client, target, namespace=namespace, **options)
                for target in targets
            ]
            # what was made is the sender's own: copied at once here, or not needed any more
            self._sender = ExperienceSender(
                self._streams, max_groups=max_unsent, offload=buffer_cpu_offload
            )
            self._delivery = GracefulSender(
                self._sender, self._stop, self._hurry, stop_timeout=stop_timeout
            )
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def build_experience_maker(
        self,
        actor: Any,
        critic: Any,
        reward_model: Any,
        initial_model: Any,
        kl_coef: float,
    ) -> ExperienceMaker:
        """Return what makes experience of prompts; override it for an algorithm of your own."""
        return NaiveExperienceMaker(actor, critic, reward_model, initial_model, kl_coef)

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in its models; None before the first update."""
        return self._follower.version

    @property
    def backpressure_s(self) -> float:
        """Seconds that sending has held up the loop."""
        return self._sender.backpressure_s

    @property
    def stopped(self) -> str:
        """Why `workingloop` ended early, "" where it did not."""
        return self._stop.why

    def workingloop(
        self,
        dataloader_fn: Callable[[], Iterable[Any]],
        num_epochs: int = 1,
        num_steps: int = 0,
    ) -> None:
        """Make experience of every batch of prompts, with the newest weights each time.

        With `in_flight_updates` they change within a batch too, between its tokens.

        SIGTERM, Ctrl-C and `stop` end it in good order: after the batch under way, when all of it
        is sent, or has found no room within `stop_timeout`.

        Args:
            dataloader_fn: Returns the batches of prompts: tensors, or dicts of tensors.
            num_epochs: Times that the loader is gone through.
            num_steps: Batches in all, instead: the loader begins anew when it runs out.

        Raises:
            WeightTimeout: No full update came in time.
            WeightMismatch: The first update does not fit the models. A later one is logged, and the
                models keep their weights.
            RecordError: A batch is neither a tensor nor a dict of tensors.
            SendFailed: What was made could not be sent; the error says how much, and why. What was
                made last was offered once more then, and is on its way unless a note says no.
        """
        with self._stop.on_signals(), self._stop.waking(self._hurry.ask):
            if self._stop:  # before anybody could be woken
                self._hurry.ask()
            if not self._wait_until_initialised():
                return
            self._callbacks.tell("on_loop_start")
            steps = num_steps if num_steps > 0 else None
            fetching = self._in_flight.running() if self._in_flight else nullcontext()
            with fetching, Progress("make", steps) as progress:
                for inputs in _batches(dataloader_fn, num_epochs, steps, self._stop.__bool__):
                    self._follow()
                    if self._stop:
                        break
                    self._make_and_send(inputs)
                    progress.advance()
            self._delivery.flush()
            self._callbacks.tell("on_loop_end")

    def stop(self, why: str = "stop() was called") -> None:
        """Ask `workingloop` to end after the batch under way; may be called by a callback."""
        self._stop.ask(why)

    def make_experience(self, inputs: Any) -> Experience:
        """Return the experience of a batch of prompts, with the weights as they are now.

        Raises:
            RecordError: The batch is neither a tensor nor a dict of tensors.
        """
        if not isinstance(inputs, Tensor | Mapping):
            raise RecordError(
                f"a batch of prompts is a {type(inputs).__name__}: give a tensor of token ids, or "
                "a dict of tensors with input_ids and attention_mask."
            )
        begun_with, options = self.policy_version, self.generate_kwargs
        if self._in_flight is not None:
            begun_with = self._in_flight.swap()
            options = {**options, "before_token": self._in_flight.swap}
        experience = self.experience_maker.make_experience(inputs, **options)
        if experience.policy_version is None:
            experience.policy_version = begun_with  # later weights are newer
        return experience

    def update_experience_maker(
        self,
        new_actor_state_dict: Mapping[str, Tensor] | None = None,
        new_actor_lora_config_dict: Mapping[str, Any] | None = None,
        new_critic_state_dict: Mapping[str, Tensor] | None = None,
        new_critic_lora_config_dict: Mapping[str, Any] | None = None,
        fully_update: bool = False,  # noqa: FBT001 (places of coati's)
        chunk_start: bool | None = None,  # noqa: FBT001
        chunk_end: bool | None = None,  # noqa: FBT001
    ) -> None:
        """Update the models from this process, in one call or in chunks.

        Trainers in other processes need not call it: their updates are followed by themselves. The
        first chunk takes the model lock; chunks are collected and loaded at the end, those tensors
        that the models have, so generation never sees half an update. When the next chunk does not
        come within `update_timeout`, the update is dropped: the lock is free again, and the models
        keep their old weights. All chunks of an update come from the thread that sent the first
        one. `on_make_experience_*` hold the lock, so that callbacks update in other hooks.

        Args:
            new_actor_state_dict: Tensors of the actor by name; with LoRA `lora_A` and `lora_B`.
            new_actor_lora_config_dict: Settings of the actor's LoRA layers by name, such as
                `LoraConfig`; the product of A and B is merged into the weights then.
            new_critic_state_dict: The same for the critic.
            new_critic_lora_config_dict: The same for the critic.
            fully_update: The models are complete after this update.
            chunk_start: This is the first chunk of several.
            chunk_end: This is the last chunk.

        Raises:
            WeightError: It is not the first chunk of an update, and this thread has none under way
                any more; or this thread makes experience at this moment.
            WeightMismatch: Something does not fit the models; they keep their old weights.
        """
        single = chunk_start is None and chunk_end is None
        if chunk_start or single:
            self._updates.begin()
        try:
            for model, state, configs in (
                ("actor", new_actor_state_dict, new_actor_lora_config_dict),
                ("critic", new_critic_state_dict, new_critic_lora_config_dict),
            ):
                if state is not None:
                    self._updates.stage(model, state, None if fully_update else configs)
        except BaseException:
            self._updates.drop()
            raise
        if chunk_end or single:
            self._updates.end()
            self._initialised = self._initialised or fully_update

    def close(self, *, timeout: float = 60.0) -> None:
        """Send what is not sent yet, and close what was opened here.

        Raises:
            SendFailed: Not everything could be sent in time. When `workingloop` has waited for it
                already, since it was asked to end, a warning says how much is given up instead.
        """
        with self._owned, ExitStack() as scope:
            for stream in self._streams:
                scope.callback(stream.close)
            self._delivery.close(self.name, timeout)

    def _follow(self) -> None:
        """Load the newest weights; while Redis is away those that are here do."""
        away = self._away_told is not None
        try:
            if self._in_flight is not None:
                self._in_flight.check()
            else:
                with stoppable(_ONE_ATTEMPT if away else self._hurry):
                    self._follower.follow()
        except StoreUnavailable as error:
            now = time.monotonic()
            if self._stop or (self._away_told and now - self._away_told < WARN_EVERY_S):
                return
            self._away_told = now
            _log.warning("maker %r goes on with the weights it has: %s", self.name, error)
        except (WeightError, DecodeError) as error:
            if self._follower.version is None:
                raise
            _log.error("maker %r keeps the weights it has: %s", self.name, error)
        else:
            self._away_told = None

    def _make_and_send(self, inputs: Any) -> None:
        tell = self._callbacks.tell
        tell("on_batch_start")
        with self._updates.exclusive():
            tell("on_make_experience_start")
            experience = self.make_experience(inputs)
            tell("on_make_experience_end", experience)
        tell("on_send_start")
        self._delivery.send(GroupedRows(experience))
        tell("on_send_end")
        tell("on_batch_end")
        if self._debug:
            _log.info("maker %r made %d samples", self.name, len(experience))

    def _wait_until_initialised(self) -> bool:
        """Wait for the first full update; False when the loop was asked to end meanwhile."""
        if not self._initialised:
            with stoppable(self._hurry):
                self._follower.wait_until_complete(
                    self._weights_timeout, lambda: bool(self._stop) or self._initialised
                )
            self._initialised = self._initialised or self._follower.complete
        return self._initialised


def _targets(names: Sequence[str]) -> list[str]:
    if isinstance(names, str) or not names:
        raise ConfigError("detached_trainer_name_list is a list of at least one trainer's name.")
    return [check_name("trainer", name) for name in names]


def _batches(
    dataloader_fn: Callable[[], Iterable[Any]],
    epochs: int,
    steps: int | None,
    ended: Callable[[], bool],
) -> Iterable[Any]:
    """Yield batches for so many epochs, or so many batches; none is drawn that is not yielded."""
    made = 0
    for _ in range(epochs) if steps is None else iter(int, 1):
        before = made
        if ended():
            return
        for batch in dataloader_fn():
            yield batch
            made += 1
            if made == steps or ended():
                return
        if steps is not None and made == before:
            raise ConfigError("dataloader_fn returned a loader without a single batch.")
