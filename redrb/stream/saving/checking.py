"""`CheckedFile`: every record of a saved task's file is checked before anything is done with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Self, TypeAlias

import msgspec
from msgspec import Meta

from redrb.errors import ConfigError, DecodeError
from redrb.experience import Status
from redrb.stream.orders import known_order
from redrb.stream.orders.order import MOST_WEIGHT
from redrb.stream.saving.file import Frame, Kind, SaveReader
from redrb.stream.saving.records import (
    SAVED,
    SAVED_FIELDS,
    DeadRecord,
    GroupName,
    GroupRecord,
    Refreshes,
    SourceRecord,
    TaskEnd,
    TaskHeader,
)
from redrb.stream.task.entries import MAX_COUNT, SavedFacts, unpack_facts
from redrb.stream.task.settings import SETTINGS, WIRE_FORMAT, whole_number

Record: TypeAlias = SourceRecord | Refreshes | DeadRecord | GroupRecord

_OTHER_NUMBERS: Final = {
    "default_max_reads": whole_number(0),
    "default_max_deliveries": whole_number(1),
    "default_max_dead": whole_number(0),
}
"""Fields of a task beside its settings."""

_LETTER_COUNT: Final = re.compile(rb"[0-9]{1,15}")
_LETTER_STATUSES: Final = frozenset(status.value.encode() for status in Status)

_Letter: TypeAlias = tuple[
    Annotated[str, Meta(pattern=r"\A[0-9]{1,20}-[0-9]{1,20}\Z")],
    Annotated[tuple[tuple[bytes, bytes], ...], Meta(max_length=64)],
    bool,
]
"""Id of a dead letter, its fields, and whether the payload of its frame is another one."""


class CheckedContents:
    """Checks the records of a file in their order, and counts them.

    Attributes:
        header: The task without its groups.
        ending: The last record; set when everything was checked.
    """

    header: TaskHeader
    ending: TaskEnd

    def __init__(self, where: str) -> None:
        self._where = where
        self._kind: Kind | None = None
        self._tags: tuple[str, ...] = ()
        self._sampled = False
        self._seq = 0
        self._letter = (0, 0)
        self._counted = [0, 0]

    def add(self, frame: Frame) -> Record | None:
        """Check one frame; returns its record, or None for the header and the ending.

        Raises:
            DecodeError: The frame is malformed, or not allowed in this place.
        """
        try:
            return self._add(frame)
        except (ValueError, ArithmeticError, RecursionError) as error:
            raise DecodeError(
                f"{self._where} is malformed, though it is whole: {error}. It was not written by "
                "redrb."
            ) from error

    def _add(self, frame: Frame) -> Record | None:
        kind, head = frame.kind, frame.head
        _require((kind is Kind.HEADER) == (self._kind is None), "the header")
        _require(self._kind is None or self._kind <= kind, "the order of records")
        self._kind = kind
        if kind is Kind.HEADER:
            self.header = _checked_header(head)
            self._tags = self.header.tags
            self._sampled = self.header.settings.get("sampled") == "1"
            return None
        if kind is Kind.GROUP:
            return self._group(msgspec.convert(head, GroupRecord), head)
        if kind is Kind.DEAD_LETTER:
            return self._dead_letter(msgspec.convert(head, _Letter), frame.payload)
        if kind is Kind.SOURCES:
            sources: SourceRecord = msgspec.convert(head, SourceRecord)
            _require(sources.origin != SAVED, "an origin")
            return sources
        if kind is Kind.REFRESHES:
            refreshes: Refreshes = msgspec.convert(head, Refreshes)
            lasts = [last for _, last in refreshes.values()]
            _require(all(last <= self.header.last for last in lasts), "a refresh")
            return refreshes
        _require(kind is Kind.END, "a frame of a table")
        self.ending = ending = msgspec.convert(head, TaskEnd)
        _require([ending.groups, ending.dead_letters] == self._counted, "the number of records")
        return None

    def _group(self, record: GroupRecord, head: Any) -> GroupRecord:
        places, count = [need.place for need in record.needs], len(self.header.groups)
        _require(len(set(places)) == len(places), "a need twice")
        _require(all(place < count for place in places), "a need")
        _require(places or not count, "a group that nobody needs")
        _check_facts(record.facts, head[1], self._tags, sampled=self._sampled)
        _require(self._seq < record.seq <= self.header.last, "the order of groups")
        self._seq = record.seq
        self._counted[0] += 1
        return record

    def _dead_letter(self, letter: _Letter, payload: bytes) -> DeadRecord:
        entry_id, pairs, has_payload = letter
        record = DeadRecord(entry_id, (*pairs, (b"g", payload)) if has_payload else pairs)
        ms, _, number = entry_id.partition("-")
        _require(self._letter < (int(ms), int(number)), "the order of dead letters")
        _require(max(int(ms), int(number)) <= MAX_COUNT, "a dead letter's id")
        _require(record.fields, "a dead letter")
        fields = dict(record.fields)
        if fields.get(b"facts"):
            _check_letter(fields, self._tags, sampled=self._sampled)
        self._letter = (int(ms), int(number))
        self._counted[1] += 1
        return record


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A complete and undamaged file.

    Attributes:
        ending: The numbers of its records.
        checksum: Checksum of the file, which identifies the save.
    """

    path: Path
    header: TaskHeader
    ending: TaskEnd
    checksum: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read all of a file, without keeping its groups; raises ConfigError or DecodeError."""
        with open_saved(path) as file:
            contents, reader = CheckedContents(str(path)), SaveReader(file, str(path))
            for frame in reader.frames(payloads=False):
                contents.add(frame)
        return cls(path, contents.header, contents.ending, reader.checksum)

    @property
    def places(self) -> int:
        """Number of the records that are put: header, dead letters, groups and end."""
        return 2 + self.ending.dead_letters + self.ending.groups


def first_kind(path: Path) -> Kind:
    """Return the kind of a file's first frame; raises ConfigError or DecodeError."""
    with open_saved(path) as file:
        return next(SaveReader(file, str(path)).frames(payloads=False)).kind


def open_saved(path: Path) -> BinaryIO:
    """Open a file of a saved task; raises ConfigError if it cannot be read."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _checked_header(head: Any) -> TaskHeader:
    header = msgspec.convert(head, TaskHeader)
    _require(len(set(header.groups)) == len(header.groups), "a consumer group twice")
    _require(header.settings.keys() <= SAVED_FIELDS, "a setting")
    _check_settings(header.settings)
    return header


def _check_settings(settings: Mapping[str, str]) -> None:
    """Check each setting of a saved task as one of a new task is checked.

    Whether they fit together is known when the task is resumed, which may have others of its own.
    """
    _require(settings.get("format", str(WIRE_FORMAT)) == str(WIRE_FORMAT), "the format")
    for name, setting in {**SETTINGS, **_OTHER_NUMBERS}.items():
        text = settings.get(name)
        if text is not None and name != "order":
            same = setting.stored(name, setting.value(text)) == text
            _require(same, f"{name}={text!r:.80}")
    name, sampled = settings.get("order", "fifo"), settings.get("sampled", "0")
    order = known_order(name)
    known = sampled in ("0", "1") and (order is None or str(int(order.sampled)) == sampled)
    _require(known, f"sampled={sampled!r:.80} in the order {name!r:.80}")


def _check_letter(fields: dict[bytes, bytes], tags: Sequence[str], *, sampled: bool) -> None:
    facts = dict(unpack_facts(fields[b"facts"]))
    facts.pop("current", None)
    _check_facts(msgspec.convert(facts, SavedFacts), facts, tags, sampled=sampled)
    for name in (b"seq", b"source"):
        given = fields.get(name, b"0" if name == b"source" else b"")
        _require(_LETTER_COUNT.fullmatch(given), "a count of a dead letter")
    _require(fields.get(b"status", b"") in _LETTER_STATUSES, "the status of a dead letter")
    msgspec.convert(fields.get(b"group", b"").decode(errors="replace"), GroupName)


def _check_facts(
    facts: SavedFacts, given: dict[str, Any], tags: Sequence[str], *, sampled: bool
) -> None:
    """Check facts of the right types; `given` are those of the file."""
    of_tags = facts.get("tags", {})
    _require(given.keys() <= SavedFacts.__annotations__.keys(), "a group's facts")
    _require(of_tags.keys() <= set(tags), "a group's tags")
    score = facts.get("score")
    numbers = [score, facts.get("priority"), *of_tags.values()]
    _require(all(number == number for number in numbers), "a number that is none")
    if sampled:
        is_weight = isinstance(score, int | float) and 0 <= score <= MOST_WEIGHT
        _require(is_weight, "a score")


def _require(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(what)
