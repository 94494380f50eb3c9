"""Rights of a maker's loop: of one task or several, waited for also while Redis is away."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from redrb.algorithms.prompts import has_entries
from redrb.connection.deadline import Deadline
from redrb.connection.outage import Outage
from redrb.connection.retries import insist
from redrb.connection.stop import Stop
from redrb.errors import (
    AdmissionRefused,
    AdmissionTimeout,
    ConfigError,
    RecordError,
    StoreUnavailable,
)
from redrb.stream import Admission, ExperienceStream
from redrb.stream.admission.admitter import MOST_RIGHTS
from redrb.stream.sending import ExperienceSender
from redrb.words import agreeing


class TaskRights:
    """Asks a task for rights to begin groups; a task without a bound of staleness gives none."""

    def __init__(self, stream: ExperienceStream, stop: Stop, maker: str) -> None:
        """Ask the task of a stream until `stop` is asked; `maker` is a word for log lines."""
        self.stream, self._stop = stream, stop
        self._refused = False
        self._outage = Outage(f"{maker} waits for Redis before it begins more groups")

    def wait(self, count: int = 1, *, least: int = 1) -> Admission | None:
        """Wait for the rights of `count` groups, or of at least `least` of them.

        None: the task gives none, as far as this process knows, or the maker is to end.
        """
        stream = self.stream

        def admit() -> Admission:
            with Deadline(stop=self._stop):
                return stream.admit(count, least=least)

        def over() -> bool:
            return self._refused or not stream.bounded

        if self._stop or (self._refused and not stream.bounded):
            return None
        try:
            right = insist(admit, self._stop, self._outage.failed, over=over)
        except (AdmissionTimeout, StoreUnavailable):
            return None
        except AdmissionRefused:
            self._refused = True
            return None
        self._outage.over()
        self._refused = False
        return right


@dataclass(frozen=True, slots=True)
class Granted:
    """The groups that a maker may begin.

    Attributes:
        each: Rights of each task; None for a task without a bound, or without a group among these.
    """

    groups: int
    each: Sequence[Admission | None]

    @property
    def version(self) -> int | None:
        """Weight version of the task when it gave the rights; None: not known, or several tasks."""
        right = self.each[0] if len(self.each) == 1 else None
        return None if right is None else right.version

    def check(self, made: int, experience_maker: object) -> None:
        """Raise ConfigError if a maker made more groups than it has rights for."""
        if made > self.groups and any(right is not None for right in self.each):
            raise ConfigError(
                f"{type(experience_maker).__name__} made {made} groups where "
                f"{self.groups} {agreeing(self.groups, 'were')} announced: give it a method "
                "count_groups(inputs) that returns the number of groups "
                "of a batch of prompts, or the samples of a prompt one group_id."
            )


@dataclass
class BatchRights:
    """Asks the tasks of a maker for the right to begin the groups of a batch.

    Several tasks are asked one after the other, always in the order of their names, so that makers
    cannot wait for each other in a circle.

    Attributes:
        sender: Knows how many of the next groups each task gets.
        waited_s: Seconds for which the loop has waited for rights.
    """

    tasks: Sequence[TaskRights]
    sender: ExperienceSender
    waited_s: float = 0.0

    @contextmanager
    def wait(self, groups: int, least: int) -> Iterator[Granted]:
        """Wait for rights; leaving the block returns those that no send has used."""
        each: list[Admission | None] = [None] * len(self.tasks)
        with ExitStack() as scope:
            began = time.monotonic()
            try:
                for number in sorted(range(len(each)), key=lambda n: self.tasks[n].stream.task):
                    share = self.sender.shares(groups)[number]
                    if not share:
                        continue
                    most = min(share, MOST_RIGHTS) if least == 1 else share
                    right = self.tasks[number].wait(most, least=1 if least == 1 else share)
                    if right is None:
                        continue
                    each[number] = scope.enter_context(right)
                    while self.sender.shares(groups)[number] > right.count:
                        groups -= 1
            finally:
                self.waited_s += time.monotonic() - began
            yield Granted(groups, each)


def rows_of(inputs: Any) -> int:
    """Return the number of prompts in a batch, or raise RecordError if it is none."""
    if isinstance(inputs, list) and all(isinstance(prompt, Mapping) for prompt in inputs):
        return len(inputs)
    if isinstance(inputs, Mapping):
        tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
        inputs = inputs.get("input_ids", tensors[0] if tensors else inputs)
    if not isinstance(inputs, Tensor):
        raise RecordError(
            f"a batch of prompts is a {type(inputs).__name__}: give a tensor of token ids, or "
            "a dict of tensors with input_ids and attention_mask; or, for experience "
            "makers that take it, a list of prompts, each a dict."
        )
    return inputs.shape[0] if inputs.dim() else 1


def split_rows(inputs: Any, rows: int) -> tuple[Any, Any]:
    """Return the first rows of a batch of prompts, and the rest; None: there is no rest."""
    size = rows_of(inputs)
    if rows >= size:
        return inputs, None
    if isinstance(inputs, Tensor | list):
        return inputs[:rows], inputs[rows:]
    parted = {name for name, value in inputs.items() if has_entries(value, size)}
    first = {name: value[:rows] if name in parted else value for name, value in inputs.items()}
    rest = {name: value[rows:] if name in parted else value for name, value in inputs.items()}
    return first, rest
