"""`Maker`: makes experience of batches of prompts with the newest weights, and sends it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Protocol

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import ConfigError
from redrb.experience import Experience
from redrb.scopes import Closing
from redrb.stream import ExperienceStream
from redrb.stream.sending import ExperienceSender, GroupedRows
from redrb.train.announcements import JobEnd
from redrb.train.callbacks import MakerCallback, together
from redrb.train.following import MakerWeights
from redrb.train.graceful_sending import GracefulSender
from redrb.train.rights import BatchRights, Granted, TaskRights, rows_of, split_rows


class ExperienceMaker(Protocol):
    """Turns prompts into experience.

    With a method `check_options(options)`, which raises ConfigError, options of generation are
    checked when the maker is made. With a method `count_groups(inputs)`, which returns how many
    groups a batch of prompts becomes, that is asked before; default: its number of rows. A method
    `make_parts` is called in place of `make_experience`, with the same arguments: it yields the
    groups of a batch in one or several parts, which are sent one by one, or none. Weights may
    change after the first part; while later ones are made they stay only if its attribute
    `parts_use_models` is true.
    """

    def make_experience(self, inputs: Any, **generate_kwargs: Any) -> Experience:
        """Return the experience of a batch of prompts."""


def check_options(experience_maker: ExperienceMaker, options: Mapping[str, Any]) -> None:
    """Refuse options that the experience maker does not know, if it can say so now."""
    signature = inspect.signature(experience_maker.make_experience)
    try:
        signature.bind_partial(**options)
    except TypeError as error:
        raise ConfigError(
            f"{type(experience_maker).__name__}.make_experience: {error}; it takes {signature}."
        ) from error
    check = getattr(experience_maker, "check_options", None)
    if check is not None:
        check(options)


def maker_stream(
    client: Client, task: str, maker: str, *, namespace: str, **options: Any
) -> ExperienceStream:
    """Open a task for a maker, which is announced at once: to load its models may take long."""
    options = {"on_bad_group": "drop", **options}
    stream = ExperienceStream(client, task, namespace=namespace, **options)
    stream.worker.label = maker
    stream.worker.begins()
    return stream


class Maker(Closing):
    """Makes experience in one process and sends it to any number of tasks.

    Subclasses call `_run` with their batches of prompts. `ExperienceMakerHolder` says what the loop
    does, and what happens while Redis is away.

    Attributes:
        experience_maker: The object that turns prompts into experience.
    """

    def __init__(
        self,
        streams: Sequence[ExperienceStream],
        experience_maker: ExperienceMaker,
        weights: MakerWeights,
        *,
        room_timeout: float,
        callbacks: Iterable[MakerCallback] = (),
        generate_kwargs: Mapping[str, Any],
        max_unsent: int = 256,
        offload: bool = True,
        end_with_job: bool = True,
    ) -> None:
        """Make a maker; arguments that are not described are those of `ExperienceMakerHolder`.

        Args:
            streams: The tasks that get the experience, sample by sample in turn; `close` closes
                them.
            weights: Keeps the models at the newest weights; its `stop` ends the loop.
            offload: Copy experience to the CPU in the loop.

        Raises:
            ConfigError: The experience maker does not know an option, or a callback is none.
        """
        check_options(experience_maker, generate_kwargs)
        self.name, self._stop = weights.maker, weights.stop
        self.experience_maker, self.generate_kwargs = experience_maker, generate_kwargs
        self._streams, self._weights = streams, weights
        self._callbacks = together(callbacks, MakerCallback)
        tasks = [stream.task for stream in streams]
        self._job_end = JobEnd(weights, tasks, self._stop) if end_with_job else None
        sender = self._sender = ExperienceSender(streams, max_groups=max_unsent, offload=offload)
        rights = [TaskRights(each, self._stop, f"maker {self.name!r}") for each in streams]
        self._rights = BatchRights(rights, sender)
        self._graceful_sender = GracefulSender(sender, self._stop, stop_timeout=room_timeout)

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in the models; None before the first."""
        return self._weights.version

    @property
    def backpressure_s(self) -> float:
        """Seconds for which sending has held up the loop."""
        return self._sender.backpressure_s

    @property
    def admission_s(self) -> float:
        """Seconds for which the loop has waited for the right to begin groups."""
        return self._rights.waited_s

    @property
    def fetch_s(self) -> float:
        """Seconds for which the loop has waited for new weights, after the first ones."""
        return self._weights.fetch_s

    @property
    def stopped(self) -> str:
        """Why the loop was asked to end; "" if it was not."""
        return self._stop.reason

    def stop(self, why: str = "stop() was called") -> None:
        """Ask the loop to end after the current batch; a callback may call it."""
        self._stop.ask(why)

    def close(self, *, timeout: float = 60.0) -> None:
        """Send the remaining groups, and close the streams."""
        with Deadline(budget=self._stop), ExitStack() as scope:
            for stream in self._streams:
                scope.callback(stream.close)
            self._graceful_sender.close(self.name, timeout)

    def _run(self, batches: Iterable[Any]) -> None:
        """Make experience of each batch of prompts, as `ExperienceMakerHolder.workingloop` does."""
        ended = self._job_end.watching() if self._job_end else nullcontext()
        with self._stop.on_signals(), Deadline(budget=self._stop), ended:
            with ExitStack() as waiting:
                for stream in self._streams:
                    waiting.enter_context(stream.worker.waiting("weights"))
                if not self._weights.wait_until_initialised():
                    return
            self._callbacks.on_loop_start()
            with self._weights.prefetching():
                drawn = iter(batches)
                while not self._stop:
                    try:
                        inputs = next(drawn)
                    except StopIteration:
                        break
                    self._make_parts(inputs)
            self._graceful_sender.flush()
            self._callbacks.on_loop_end()

    def _begin_batch(self) -> tuple[int | None, dict[str, Any]]:
        """Announce the version of the weights; return it, and options for the experience maker."""
        version, options = self._weights.begin_batch()
        for stream in self._streams:
            stream.worker.weights_name = self._weights.name
            stream.worker.weight_version = version or 0
        return version, {**self.generate_kwargs, **options}

    def _note(self, experience: Experience, version: int | None) -> None:
        """Give samples without a weight version this one; announce the rewards.

        Without weights of a trainer it is 0, the version before the first: their groups become
        stale as well, also if the trainer gives its bound only later.
        """
        version = version or 0
        given = experience.policy_version  # a list for a part of a batch, also if none is known
        if given is None:
            experience.policy_version = version  # the oldest: later tokens have newer weights
        elif not isinstance(given, int):
            experience.policy_version = [version if each is None else each for each in given]
        if experience.reward is not None:
            for stream in self._streams:
                stream.worker.metrics = {"reward": experience.reward.float().nanmean()}

    def _make_parts(self, inputs: Any) -> None:
        rest, left = inputs, True
        while left:
            count = getattr(self.experience_maker, "count_groups", rows_of)
            rows, groups = rows_of(rest), count(rest)  # groups that the prompts become, at most
            rows_each = rows // groups if groups and rows % groups == 0 else 0
            with self._rights.wait(groups, 1 if rows_each else groups) as granted:
                if self._stop:
                    return
                self._weights.refresh(granted.version)
                if self._stop:
                    return
                part, rest = split_rows(rest, granted.groups * rows_each or rows)
                left = rest is not None
                self._make_and_send(part, granted)

    def _make_and_send(self, inputs: Any, granted: Granted) -> None:
        self._callbacks.on_batch_start()
        for stream in self._streams:
            stream.worker.steps.begin()
        groups = 0
        for experience in self._made(inputs):
            self._callbacks.on_send_start()
            rows = GroupedRows(experience)
            groups += len(rows.rows())
            granted.check(groups, self.experience_maker)
            self._graceful_sender.send(rows, granted.each)
            self._callbacks.on_send_end()
        for stream in self._streams:
            stream.worker.steps.end()
        self._callbacks.on_batch_end()

    def _made(self, inputs: Any) -> Iterator[Experience]:
        """Yield the experience of a batch; groups that are ready later are other parts.

        Models are locked while the first part is made, and the others if models make them.
        """
        parts, exclusive = self._parts(inputs), self._weights.models.exclusive
        with exclusive():
            self._callbacks.on_make_experience_start()
            experience = next(parts, None)
            if experience is not None:
                self._callbacks.on_make_experience_end(experience)
        uses_models = getattr(self.experience_maker, "parts_use_models", False)
        while experience is not None:
            yield experience
            with exclusive() if uses_models else nullcontext():
                experience = next(parts, None)
                if experience is not None:
                    self._callbacks.on_make_experience_start()
                    self._callbacks.on_make_experience_end(experience)

    def _parts(self, inputs: Any) -> Iterator[Experience]:
        version, options = self._begin_batch()
        make_parts = getattr(self.experience_maker, "make_parts", None)
        if make_parts is None:
            parts = [self.experience_maker.make_experience(inputs, **options)]
        else:
            parts = make_parts(inputs, **options)
        for experience in parts:
            self._note(experience, version)
            yield experience
