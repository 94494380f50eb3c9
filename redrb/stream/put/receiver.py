"""`Receiver`: stores groups that have a source, each source once: forwarded and numbered groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from msgspec import structs

from redrb.connection.deadline import Deadline
from redrb.connection.transport import Pipeline
from redrb.errors import LeaseLost, OutcomeUnknown
from redrb.experience import BufferItem
from redrb.stream.put.batch import PutBatch
from redrb.stream.put.calls import Adopt
from redrb.stream.put.options import PutOptions, Sources, SourcesRefused
from redrb.stream.put.preparer import Groups
from redrb.stream.put.producer import Producer
from redrb.stream.task.origin import Look, Origin, OriginState, SourceGroup
from redrb.stream.task.task import Task
from redrb.unpacking import Reading

MOST_GROUPS = 256
"""Most groups of one put, dropped ones included: the script looks at the records of all."""

LOOK_EVERY = 64
"""Groups that are forwarded from an origin before it is asked which of its groups have gone."""

NUMBERS = "numbers"
"""Origin of groups that have numbers; the names of others contain a ":"."""


Pair: TypeAlias = tuple[list[BufferItem] | None, SourceGroup]
"""The samples of a group, None to count it as filtered, and its source."""


@dataclass(eq=False, repr=False)
class Receiver:
    """Stores forwarded groups in one task; safe among threads.

    The put of a group records its source in the same transaction, so nobody else can store this
    source again, and nobody else needs to. `docs/contributing/decisions/stages.md` says how
    long the record is kept.
    """

    _task: Task
    _producer: Producer
    _prepare: Callable[[Groups, PutOptions], PutBatch]
    _states: dict[tuple[str, str], OriginState] = field(default_factory=dict)
    _since: dict[tuple[str, str], int] = field(default_factory=dict)

    def receive(
        self,
        groups: Sequence[list[BufferItem] | None],
        sources: Sequence[SourceGroup],
        origin: Origin,
        options: PutOptions,
    ) -> list[int | None]:
        """Store groups whose sources were not stored before.

        Args:
            groups: Samples of each group; None: count the group as filtered.

        Returns:
            Id of each group, also of those that were stored before; None for filtered ones.

        Raises:
            As `ExperienceStream.put` does; the groups stored until then are recognized later.
            LeaseLost: The groups have left the origin: others have forwarded or ended them.
        """
        found: dict[int, int] = {}
        left = list(range(len(groups)))
        key = (origin.name, origin.incarnation)
        since = self._since.get(key, LOOK_EVERY)
        if since >= LOOK_EVERY:
            state = origin.store.call(Look(str(sources[0].seq)))
            if state.incarnation == origin.incarnation:
                self._states[key] = state
            since = 0
        self._since[key] = since + len(groups)
        while left:
            page = left[:MOST_GROUPS]
            wanted = [sources[place] for place in page]
            pairs = [(groups[place], sources[place]) for place in page]
            try:
                stored = self._put(pairs, origin, options)
            except SourcesRefused as refusal:
                if refusal.row is not None:
                    self._adopt(origin, wanted, refusal.row)
                stored = self._known(origin, wanted)
            except OutcomeUnknown:  # the records tell what is stored
                stored = self._known(origin, wanted)
            found |= {place: stored[sources[place]] for place in page if sources[place] in stored}
            before, left = len(left), [place for place in left if place not in found]
            if len(left) == before:
                self._task.store.refused(origin.name, before)
        return [found[place] or None for place in range(len(groups))]

    def receive_next(self, make: Callable[[int], list[BufferItem]], count: int) -> None:
        """Store the groups of the next numbers, which others may store at the same time.

        Ids are no such numbers: a put that fails leaves some out.
        """
        store, asked = self._task.store, Pipeline()
        asked.add("HKEYS", f"{store.keys.prefix}sources:{NUMBERS}")
        (stored,) = store.exchange(asked)
        with Reading("the records of numbered groups"):
            last = max(map(int, stored), default=0)
        numbers = range(last + 1, last + count + 1)
        kept = tuple(SourceGroup(number, "0") for number in numbers)
        options = PutOptions(sources=Sources(NUMBERS, "0", floor=last, kept=kept))
        batch = self._prepare([make(number) for number in numbers], options)
        batch.raise_refused()
        with suppress(SourcesRefused), Deadline():  # another process was first
            self._producer.put(batch)

    def _put(
        self, pairs: Sequence[Pair], origin: Origin, options: PutOptions
    ) -> dict[SourceGroup, int]:
        """Store groups, or none of them; returns the id of each source, 0 for filtered ones."""
        sources = [source for _, source in pairs]
        kept = [(group, source) for group, source in pairs if group]
        dropped = tuple(source for group, source in pairs if not group)
        state = self._states.get((origin.name, origin.incarnation))
        named = Sources(
            origin.name,
            origin.incarnation,
            *((state.floor, state.kept) if state else (0, ())),
            tuple(source for _, source in kept),
            dropped,
        )
        if kept:
            batch = self._prepare([group for group, _ in kept], replace(options, sources=named))
            batch.raise_refused()
        else:
            batch = PutBatch((), self._task.description.revision, sources=named)
        batch = structs.replace(batch, filtered=batch.filtered + len(dropped))
        ids = self._producer.put(batch)
        if len(ids) < len(batch.sources.kept):  # the task's fields changed, and some were dropped
            return self._known(origin, sources)
        return dict.fromkeys(sources, 0) | dict(zip(batch.sources.kept, ids, strict=True))

    def _known(self, origin: Origin, sources: Sequence[SourceGroup]) -> dict[SourceGroup, int]:
        """Return the ids of those sources that were stored before."""
        store, made, found = self._task.store, Pipeline(), {}
        made.add("HGET", f"{store.keys.prefix}sources", origin.name)
        made.add(
            "HMGET",
            f"{store.keys.prefix}sources:{origin.name}",
            *(source.seq for source in sources),
        )
        row, records = store.exchange(made)
        with Reading("the records of forwarded groups"):
            if row is None or row.split()[0].decode() != origin.incarnation:
                return {}
            for source, record in zip(sources, records, strict=True):
                stored, digest = record.decode().split() if record else ("0", "")
                if digest == source.digest:
                    found[source] = int(stored)
        return found

    def _adopt(self, origin: Origin, sources: Sequence[SourceGroup], row: str) -> None:
        """Let the task accept sources that it takes for those of the past; else LeaseLost."""
        oldest = min(source.seq for source in sources)
        state = origin.store.call(Look(str(oldest)))
        if state.incarnation != origin.incarnation or not state.stored:
            raise LeaseLost(
                task=origin.store.task,
                ids=tuple(source.seq for source in sources),
                why="other consumers have taken groups over and ended them, or the task was "
                "created anew. Nothing of this call needs to be repeated.",
            )
        self._states.pop((origin.name, origin.incarnation), None)
        said = (state.incarnation, state.floor, state.kept)
        self._task.store.call(Adopt(origin.name, row, *said))
