"""The records of a saved task: header, sources, dead letters, groups, refreshes and ending.

They are pure data. A file may come from an untrusted source: the types say which values are
accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from redrb.experience import Status
from redrb.stream.task.entries import MAX_COUNT, Count, SavedFacts
from redrb.stream.task.settings import STORED_DEFAULTS, STORED_NAMES

SAVED_FIELDS: Final = frozenset(
    {*STORED_NAMES, *STORED_DEFAULTS, "format", "implied", "configured"}
)
"""Fields of a task that are saved: its settings, and what is noted about them."""

SAVED: Final = "saved"
"""Origin of the records of a file that are put anew: see `redrb/lua/include/sources.lua`."""

MAX_GROUPS: Final = 4096
"""Most consumer groups."""

FieldName: TypeAlias = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,63}\Z")]
GroupName: TypeAlias = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._/@+-]{1,128}\Z")]
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]

_RULE = r"(-|[0-9]{1,16})"

Refreshes: TypeAlias = dict[
    Annotated[str, Meta(pattern=rf"\A({'|'.join(Status)}|expired( {_RULE}){{3}})\Z")],
    tuple[Count, Count],
]
"""Train step of the last refresh of a `ReplayBuffer`, and the newest id then, by status; of expired
groups by number and rule, too."""


class TaskHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task without its groups, when the save began.

    Attributes:
        saved_ms: When the save began, in ms since 1970.
        settings: Its settings as Redis keeps them.
        last: Newest id.
        version: Newest weight version that the task knew; 0: none.
        groups: Names of its consumer groups.
    """

    task: Annotated[str, Meta(max_length=128)]
    saved_ms: Count
    settings: dict[FieldName, Text]
    last: Count
    version: Count
    groups: Annotated[tuple[GroupName, ...], Meta(max_length=MAX_GROUPS)]

    @property
    def tags(self) -> tuple[str, ...]:
        """Names of the declared tags."""
        return declared_tags(self.settings)


class SourceRecord(NamedTuple):
    """Some groups that stages forwarded into the task from one origin.

    Attributes:
        origin: The task and consumer group that they come from.
        row: The origin's row, as `redrb/lua/include/sources.lua` describes it.
        digests: Digest of each group, by its id there.
    """

    origin: Annotated[str, Meta(pattern=r"\A[^\x00-\x20]{1,1024}\Z")]
    row: Annotated[
        str,
        Meta(pattern=r"\A[0-9a-f]{1,64} [0-9]{1,15} [0-9]{1,15}( ([0-9]{1,15}(,(?=.)|$))*)?\Z"),
    ]
    digests: dict[
        Annotated[str, Meta(pattern=r"\A[1-9][0-9]{0,14}\Z")],
        Annotated[str, Meta(pattern=r"\A(0|[0-9a-f]{16})\Z")],
    ]


class DeadRecord(NamedTuple):
    """A dead letter: its id in Redis, and its fields in their order."""

    entry_id: str
    fields: tuple[tuple[bytes, bytes], ...]


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
    moved: Annotated[str, Meta(pattern=rf"\A({'|'.join(Status)})?\Z")] = ""
    expiry: Annotated[str, Meta(max_length=64)] = ""
    failed: Count = 0
    reads: Count = 0


class GroupRecord(NamedTuple):
    """One stored group without its payload.

    Attributes:
        seq: Its id in the saved task.
        needs: Consumer groups that have not acknowledged it yet.
    """

    seq: Annotated[int, Meta(gt=0, le=MAX_COUNT)]
    facts: SavedFacts
    needs: tuple[Need, ...]


class TaskEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last record of a file: the number of its records."""

    groups: Count = 0
    dead_letters: Count = 0


def declared_tags(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the tags that the settings of a task declare; raises ValueError if malformed."""
    names = json.loads(settings.get("tags") or "[]")
    if not isinstance(names, list):
        raise ValueError("tags are no list")  # noqa: TRY004 (of a file, not of a caller)
    return tuple(names)
