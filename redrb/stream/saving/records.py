"""The records of a saved task: header, groups, dead letters and ending; pure data.

A file may come from an untrusted source: the types say which values are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from redrb.experience import Status
from redrb.stream.task.entries import MAX_COUNT, Count, SavedFacts

COUNTERS = (
    "last put samples_put bytes_put filtered kept_back evicted arrived_stale sized_after version "
    "floor dead_dropped"
).split()
"""Fields of a task that are counters; other fields are settings, unless they are transient."""

PUT_COUNTERS = ("last", "put", "samples_put", "bytes_put")
"""Those counters that every put changes: Redis keeps them apart, in the hash `puts`."""

PUT_FIELDS = (*PUT_COUNTERS, "epoch")
"""Fields of the hash `puts`; all others are names of producers."""

_TRANSIENT = frozenset(
    {
        "bytes",
        "queued",
        "restored",
        "restored_file",
        "part",
        "revision",
        "kind",
        "epoch_ms",
        "epoch_at",
        "filling",
    }
)
"""Fields of a task that are not saved."""

MAX_GROUPS: Final = 4096
"""Most consumer groups."""

MOST_ANCESTORS = 64
"""Incarnations that a restored task knows."""

_ENDED = ("acked", "expired", "filtered", "evicted", "dead")
"""Counters of groups that a consumer group does not need any more."""


Change: TypeAlias = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
FieldName: TypeAlias = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,63}\Z")]
GroupName: TypeAlias = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._/@+-]{1,128}\Z")]
StalenessName: TypeAlias = Annotated[str, Meta(pattern=r"\A[onfq][0-9]{1,4}\Z")]
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]

Producers: TypeAlias = dict[
    Annotated[str, Meta(max_length=2048)],
    Annotated[str, Meta(pattern=r"\A[0-9]{1,15} [0-9]{1,15} [0-9]{1,15}\Z")],
]
"""Number, last id and groups of the last put of each producer, by its name."""

_RULE = r"(-|[0-9]{1,16})"

Refreshes: TypeAlias = dict[
    Annotated[str, Meta(pattern=rf"\A({'|'.join(Status)}|expired {_RULE} {_RULE})\Z")],
    Annotated[str, Meta(pattern=r"\A[0-9]{1,16} [0-9]{1,16}\Z")],
]
"""Train step of the last refresh of a `ReplayBuffer`, and the newest id then, by status; of expired
groups by rule, too."""


class ConsumerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A consumer group of a saved task.

    Attributes:
        counters: Its counters when the save began.
        held: Groups that waited or were leased then.
        staleness: How stale the groups were that it took: "o<versions>" or "n<versions>" -> groups.
    """

    name: GroupName
    counters: dict[FieldName, Change]
    held: Count = 0
    staleness: dict[StalenessName, Change] = {}

    def ledger(self, waiting: int) -> dict[str, int]:
        """Return its counters in the restored task.

        Groups that ended while the task was saved are in no counter.
        """
        counters = dict(self.counters)
        counters.pop("waiting", None)
        counters["put"] = waiting + sum(counters.get(name, 0) for name in _ENDED)
        return counters


class TaskHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task without its groups.

    Attributes:
        saved_ms: When the save began, in ms since 1970.
        settings: Its settings as Redis keeps them.
        counters: Its counters when the save began.
    """

    task: Annotated[str, Meta(max_length=128)]
    saved_ms: Count
    settings: dict[FieldName, Text]
    counters: dict[FieldName, Change]
    groups: Annotated[tuple[ConsumerGroup, ...], Meta(max_length=MAX_GROUPS)]

    @property
    def last(self) -> int:
        """Newest id."""
        return self.counters.get("last", 0)

    @property
    def tags(self) -> tuple[str, ...]:
        """Names of the declared tags."""
        return declared_tags(self.settings)


class Need(NamedTuple):
    """A consumer group that has not acknowledged a group yet.

    Attributes:
        place: Index of the consumer group in the header.
        moved: Status that the group was moved to, or "".
        expiry: Version and rules by which the group expired, or "".
        failed: Failed deliveries.
        reads: Acknowledged deliveries.
    """

    place: Count
    moved: Annotated[str, Meta(pattern=rf"\A({'|'.join(Status)})?\Z")]
    expiry: Annotated[str, Meta(max_length=64)]
    failed: Count
    reads: Count


class GroupRecord(NamedTuple):
    """One stored group without its payload.

    Attributes:
        needs: Consumer groups that have not acknowledged it yet.
    """

    seq: Annotated[int, Meta(gt=0, le=MAX_COUNT)]
    facts: SavedFacts
    needs: tuple[Need, ...]


class DeadRecord(NamedTuple):
    """A dead letter: its id in Redis, and its fields in their order."""

    entry_id: str
    fields: tuple[tuple[bytes, bytes], ...]


class TaskEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last record of a file: the number of its records.

    Attributes:
        waiting: For each consumer group, the groups in the file that it needs.
    """

    groups: Count = 0
    dead_letters: Count = 0
    waiting: list[Count] = []


def settings_of(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the settings among the fields that Redis keeps of a task."""
    others = _TRANSIENT.union(COUNTERS)
    return {name: value for name, value in fields.items() if name not in others}


def ancestors_of(header: TaskHeader) -> str:
    """Return which ids of the restored task are ids of earlier incarnations.

    Pairs of an incarnation and its last id in the file: up to it, an id names the same group.
    """
    words = header.settings.get("ancestors", "").split()
    if "incarnation" in header.settings:
        words += [header.settings["incarnation"], str(header.last)]
    return " ".join(words[-2 * MOST_ANCESTORS :])


def declared_tags(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the tags that the settings of a task declare; raises ValueError if malformed."""
    names = json.loads(settings.get("tags") or "[]")
    if not isinstance(names, list):
        raise ValueError("tags are no list")  # noqa: TRY004 (of a file, not of a caller)
    return tuple(names)


class SourceRecord(NamedTuple):
    """Some groups that stages forwarded into the task from one origin.

    Attributes:
        origin: The task and consumer group that they come from.
        row: The origin's row, as `redrb/lua/include/sources.lua` describes it.
        records: Id here and digest of each group, by its id there.
    """

    origin: Annotated[str, Meta(pattern=r"\A[^\x00-\x20]{1,1024}\Z")]
    row: Annotated[
        str,
        Meta(pattern=r"\A[0-9a-f]{1,64} [0-9]{1,15} [0-9]{1,15}( ([0-9]{1,15}(,(?=.)|$))*)?\Z"),
    ]
    records: dict[
        Annotated[str, Meta(pattern=r"\A[1-9][0-9]{0,14}\Z")],
        Annotated[str, Meta(pattern=r"\A[0-9]{1,15} [0-9a-f]{16}\Z")],
    ]
