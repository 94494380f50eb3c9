"""Makers of the task that a stage forwards: groups in parts, and groups with rights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redrb import BufferItem
from redrb.errors import RedrbError
from redrb.stream import Admission
from tests.chaos import options, payload, tasks
from tests.chaos.checkpoint import Checkpoint
from tests.chaos.makers import ManyPutter, fate
from tests.chaos.options import Place

MOST_AHEAD = 10
"""Groups that one maker of parts may be ahead of the other."""

POLICY_VERSION = 0
"""The task knows no current version, so no group is ever too stale."""


class Admitted(ManyPutter):
    """Asks for rights, and puts a group for most of them."""

    task = tasks.ROLLOUTS

    def step(self) -> None:
        self.pause(self.dice.uniform(0, 0.3))
        with self.rights(8) as rights:
            self.pause(self.dice.uniform(0, 0.1))
            names, timeout = self.new_names(max(1, rights.left - 1)), self.timeout()
            groups = [payload.group(name) for name in names]
            with self.journal.call("put_many", timeout, groups=names, admitted=names) as outcome:
                try:
                    self._stream.put_many(
                        groups, policy_version=POLICY_VERSION, admission=rights, timeout=timeout
                    )
                except RedrbError as error:
                    outcome |= fate(names, error)
                    raise
                outcome["stored"] = names

    @contextmanager
    def rights(self, count: int) -> Iterator[Admission]:
        """Yield some rights, and return those that are not used."""
        timeout = self.timeout()
        with self.journal.call("admit", timeout):
            rights = self._stream.admit(count, least=1, timeout=timeout)
        try:
            yield rights
        finally:
            with self.journal.call("cancel", options.RETRY_S):
                rights.cancel()


class Parts(Admitted):
    """Puts every second part of each group, the other maker of parts the others.

    Both number the groups alike. The next number is in a file, so that a process that takes the
    place of a killed one begins with the group that was not finished: its parts are put again.
    Some groups come with a right from one maker, some from both, some without.
    """

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, place)
        role = name.split("-")[0]
        self._place = int(role.removeprefix("parts"))
        self._next = Checkpoint(place.directory / f"{role}.next")
        self._other = Checkpoint(place.directory / f"parts{1 - self._place}.next")

    def step(self) -> None:
        self.pause(self.dice.uniform(0, 0.1))
        number = self._next.load()
        if number > self._other.load() + MOST_AHEAD:
            return
        name = f"parts#{number}"
        samples = payload.group(name)
        for index in range(self._place, len(samples), 2):
            self._put(name, samples, index, with_right=number % (2 + self._place) == 0)
        self._next.store(number + 1)

    def _put(self, name: str, samples: list[BufferItem], index: int, *, with_right: bool) -> None:
        if not with_right:
            self._put_part(name, samples, index, None)
            return
        with self.rights(1) as right:
            self._put_part(name, samples, index, right)

    def _put_part(
        self, name: str, samples: list[BufferItem], index: int, right: Admission | None
    ) -> None:
        timeout = self.timeout()
        about = {"part": name, "index": index, "of": len(samples), "right": right is not None}
        with self.journal.call("put_part", timeout, **about) as outcome:
            group = self._stream.put_part(
                name,
                samples[index],
                index=index,
                of=len(samples),
                part_age=f"{options.PART_AGE_S:.0f}s",
                policy_version=POLICY_VERSION,
                admission=right,
                timeout=timeout,
            )
            outcome["there"] = True
            if group is not None:
                outcome["stored"] = [name]
