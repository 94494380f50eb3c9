"""`PartitionedLease`: the groups that a take from several partitions returns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from redrb.checks import checked_int
from redrb.codec import GroupLayout
from redrb.errors import ConfigError, RecordError
from redrb.stream.take.endings import Chosen
from redrb.stream.take.lease import Lease
from redrb.stream.take.lease_part import Expiry, LeasePart
from redrb.stream.task.numbering import Numbering


class PartitionedLease(Lease):
    """A lease with parts of several partitions; its ids are those of the whole task."""

    def __init__(
        self, parts: Sequence[tuple[int, LeasePart]], numbering: Numbering, incarnation: str
    ) -> None:
        """Make a lease.

        Args:
            parts: Partition and part.
            numbering: Ids of the task.
            incarnation: Incarnations of all partitions, separated by dots.
        """
        super().__init__([part for _, part in parts])
        self._partitions = {id(part): number for number, part in parts}
        self._numbering = numbering
        self._incarnation = incarnation

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the groups that are still leased, in the order of the batch."""
        return tuple(group for part in self._parts for group in self._names(part, part.layouts))

    @property
    def incarnation(self) -> str:
        """Incarnations of the partitions in which the groups were leased; `settle` asks for it."""
        return self._incarnation

    def _draw(self) -> tuple[list[float], float]:
        """Refuse: partitions are chosen in turn, not by the weights of their groups."""
        raise ConfigError(
            "a task with partitions tells no probabilities: each partition draws by its own "
            "weights, and the partitions are chosen in turn."
        )

    @property
    def layouts(self) -> dict[int, GroupLayout]:
        """The groups that are still leased, checked and not decoded yet, by id."""
        return dict(
            zip(
                self.ids,
                (one for part in self._parts for one in part.layouts.values()),
                strict=True,
            )
        )

    @property
    def expiries(self) -> dict[int, Expiry | None]:
        """Why groups that were taken with status EXPIRED expired; None if put as expired."""
        return {
            group: part.expiries[seq]
            for part in self._parts
            for seq, group in zip(part.expiries, self._names(part, part.expiries), strict=True)
        }

    def _names(self, part: LeasePart, seqs: Collection[int]) -> tuple[int, ...]:
        return self._numbering.ids(self._partitions[id(part)], seqs)

    def _select(self, ids: Collection[int]) -> Chosen:
        wanted = dict.fromkeys(checked_int("id", group, 1) for group in ids)
        unknown = sorted(set(wanted).difference(self.ids))
        if unknown:
            raise ConfigError(f"groups {unknown} are not in this lease; it holds {list(self.ids)}.")
        chosen: Chosen = []
        for part in self._parts:
            here = dict(zip(self._names(part, part.layouts), part.layouts, strict=True))
            found = tuple(here[group] for group in wanted if group in here)
            if found:
                chosen.append((part, found))
        return chosen

    def _place(self, part: LeasePart) -> str:
        return f"partition {self._partitions[id(part)]} of task {part.task!r}"

    def _name_misfits(self, error: RecordError) -> None:
        super()._name_misfits(error)
        error.ids = tuple(
            group for part, seqs in self._misfits for group in self._names(part, seqs)
        )
