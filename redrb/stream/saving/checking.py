"""Checks of a saved task's file: every record is checked before anything is done with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, cast

from redrb.codec.wire import MAX_BLOB_BYTES, MAX_SAMPLES
from redrb.errors import DecodeError
from redrb.experience import Status
from redrb.orders.order import MOST_WEIGHT
from redrb.stream.saving.checking_settings import check_saved_settings
from redrb.stream.saving.file import Frame, Kind
from redrb.stream.saving.records import (
    PUT_COUNTERS,
    PUT_FIELDS,
    ConsumerGroup,
    DeadRecord,
    GroupRecord,
    Need,
    SourceRecord,
    TaskEnd,
    TaskHeader,
)
from redrb.stream.task.facts import Facts, unpack_facts
from redrb.stream.task.tags import MOST_BYTES

Record: TypeAlias = GroupRecord | DeadRecord | SourceRecord | dict[str, str]

MAX_GROUPS: Final = 4096
"""Most consumer groups."""

_STATUSES: Final = frozenset(Status)
_MAX_COUNT: Final = 2**52
"""Half of what doubles hold exactly: a resumed task counts on from here."""
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_GROUP_NAME: Final = re.compile(r"[A-Za-z0-9._/@+-]{1,128}")
_INCARNATION: Final = re.compile(r"[0-9a-f]{1,64}")
_ANCESTORS: Final = re.compile(r"([0-9a-f]{1,64} [0-9]{1,16}( (?=.)|$))*")
_STALENESS: Final = re.compile(r"[onfq][0-9]{1,4}")
_ENTRY_ID: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_LETTER_COUNT: Final = re.compile(rb"[0-9]{1,15}")
_LETTER_STATUSES: Final = frozenset(status.value.encode() for status in Status)
_ORIGIN: Final = re.compile(r"[^\x00-\x20]{1,1024}")
_ROW: Final = re.compile(r"[0-9a-f]{1,64} [0-9]{1,15} [0-9]{1,15}( ([0-9]{1,15}(,(?=.)|$))*)?")
_ID: Final = re.compile(r"[1-9][0-9]{0,14}")
_RECORD: Final = re.compile(r"([0-9]{1,15}) [0-9a-f]{16}")
_OPERATION: Final = re.compile(r"[0-9]{1,15} [0-9]{1,15} [0-9]{1,15}")
_REQUIRED_FACTS: Final = {"size", "samples", "status"}
_OTHER_FACTS: Final = {"score", "priority", "version", "newest", "reads", "tags"}


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
        self._begun = False
        self._tags: tuple[str, ...] = ()
        self._sampled = False
        self._seq = 0
        self._letter = (0, 0)
        self._counted: list[int] = [0, 0, 0]
        self._waiting: list[int] = []

    def add(self, frame: Frame) -> Record | None:
        """Check one frame; returns its record, or None for the header and the ending.

        Raises:
            DecodeError: The frame is malformed, or not allowed in this place.
        """
        try:
            return self._add(frame)
        except _Malformed as error:
            raise DecodeError(
                f"{self._where} is malformed, though it is whole: {error}. It was not written by "
                "redrb."
            ) from error

    def _add(self, frame: Frame) -> Record | None:
        _require(self._begun != (frame.kind is Kind.HEADER), "the header")
        if frame.kind is Kind.HEADER:
            self.header, self._begun = parse_header(frame.head), True
            self._tags = self.header.tags
            self._sampled = self.header.settings.get("sampled") == "1"
            self._waiting = [0] * len(self.header.groups)
            return None
        if frame.kind is Kind.GROUP:
            groups = len(self.header.groups)
            return self._group(parse_group(frame.head, groups, self._tags, sampled=self._sampled))
        if frame.kind is Kind.DEAD_LETTER:
            return self._dead_letter(parse_dead_letter(frame))
        if frame.kind is Kind.SOURCES:
            try:
                return _checked_sources(frame.head, self.header.last)
            except ValueError as error:
                raise _Malformed(str(error)) from error
        if frame.kind is not Kind.END:
            pairs = _pairs(frame.head, 2048)
            _require(all(map(_OPERATION.fullmatch, pairs.values())), "pairs")
            _require(pairs.keys().isdisjoint(PUT_FIELDS), "a producer")
            return pairs
        self.ending = ending = _parse_ending(frame.head)
        numbers = [ending.groups, ending.archived, ending.dead_letters]
        whole = numbers == self._counted and ending.waiting == self._waiting
        _require(whole, "the number of records")
        return None

    def _group(self, record: GroupRecord) -> GroupRecord:
        _require(self._seq < record.seq <= self.header.last, "the order of groups")
        _require(not (record.archived and record.needs), "history that is needed")
        self._seq = record.seq
        self._counted[0] += 1
        self._counted[1] += record.archived != ""
        for need in record.needs:
            self._waiting[need.place] += 1
        return record

    def _dead_letter(self, record: DeadRecord) -> DeadRecord:
        ms, _, number = record.entry_id.partition("-")
        _require(self._letter < (int(ms), int(number)), "the order of dead letters")
        _require(max(int(ms), int(number)) <= _MAX_COUNT, "a dead letter's id")
        _require(record.fields, "a dead letter")
        fields = dict(record.fields)
        if fields.get(b"facts"):
            _check_letter(fields, self._tags, sampled=self._sampled)
        self._letter = (int(ms), int(number))
        self._counted[2] += 1
        return record


def parse_header(head: Any) -> TaskHeader:
    """Return the header that a frame holds."""
    fields = _map(head, "header")
    groups = fields.get("groups")
    _require(isinstance(groups, list) and len(groups) <= MAX_GROUPS, "consumer groups")
    _require(_is_text(fields.get("task"), 128), "the name")
    _require(_is_count(fields.get("saved_ms")), "the time")
    settings = _pairs(fields.get("settings"), 1 << 16)
    _require(all(map(_NAME.fullmatch, settings)), "settings")
    _require(_INCARNATION.fullmatch(settings.get("incarnation", "0")), "the incarnation")
    _require(_ANCESTORS.fullmatch(settings.get("ancestors", "")), "earlier incarnations")
    parsed = tuple(map(_parse_consumer_group, groups or ()))
    _require(len({group.name for group in parsed}) == len(parsed), "a consumer group twice")
    header = TaskHeader(
        task=fields["task"],
        saved_ms=fields["saved_ms"],
        settings=settings,
        counters=_counters(fields.get("counters"), _NAME),
        groups=parsed,
    )
    _require(all(header.counters.get(name, 0) >= 0 for name in PUT_COUNTERS), "counters")
    try:
        _require(all(_is_text(name, 128) for name in header.tags), "tags")
        check_saved_settings(settings, header.tags)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"settings: {error}") from error
    return header


def parse_group(head: Any, groups: int, tags: Sequence[str], *, sampled: bool) -> GroupRecord:
    """Return the record of a group that a frame holds.

    Args:
        head: Head of the frame.
        groups: Number of consumer groups.
        tags: Names of the declared tags.
        sampled: Whether the task's order draws: scores are weights then.
    """
    _require(isinstance(head, list) and len(head) == 4, "a group")
    seq, facts, archived, needs = head
    _require(_is_count(seq) and seq > 0, "a group")
    dated = _is_text(archived, 20) and re.fullmatch(r"[0-9]*", archived)
    _require(dated, "a time")
    _require(isinstance(needs, list) and len(needs) <= groups, "a group's needs")
    parsed = tuple(_parse_need(need, groups) for need in needs)
    _require(len({need.place for need in parsed}) == len(parsed), "a need twice")
    return GroupRecord(seq, _parse_facts(facts, tags, sampled=sampled), archived, parsed)


def _check_letter(fields: dict[bytes, bytes], tags: Sequence[str], *, sampled: bool) -> None:
    """Check what a dead letter needs to be requeued."""
    facts = dict(unpack_facts(fields[b"facts"]))
    facts.pop("current", None)
    _parse_facts(facts, tags, sampled=sampled)
    for name in (b"seq", b"reads", b"unread", b"rejected", b"source"):
        given = fields.get(name, b"0" if name == b"source" else b"")
        _require(_LETTER_COUNT.fullmatch(given), "a count of a dead letter")
    _require(fields.get(b"status", b"") in _LETTER_STATUSES, "the status of a dead letter")
    group = fields.get(b"group", b"").decode(errors="replace")
    _require(_GROUP_NAME.fullmatch(group), "the consumer group of a dead letter")


def parse_dead_letter(frame: Frame) -> DeadRecord:
    """Return the dead letter that a frame holds."""
    _require(isinstance(frame.head, list) and len(frame.head) == 3, "a dead letter")
    entry_id, pairs, has_payload = frame.head
    _require(_is_text(entry_id, 41) and _ENTRY_ID.fullmatch(entry_id), "a dead letter's id")
    _require(isinstance(pairs, list) and len(pairs) <= 64, "a dead letter")
    for pair in pairs:
        _require(isinstance(pair, list) and len(pair) == 2, "a dead letter")
        _require(all(isinstance(word, bytes) for word in pair), "a dead letter")
    fields = tuple((name, value) for name, value in pairs)
    return DeadRecord(entry_id, (*fields, (b"g", frame.payload)) if has_payload is True else fields)


def _parse_consumer_group(value: Any) -> ConsumerGroup:
    fields = _map(value, "a consumer group")
    name, held = fields.get("name"), fields.get("held")
    _require(isinstance(name, str) and _GROUP_NAME.fullmatch(name), "a group's name")
    _require(_is_count(held), "a group's count")
    return ConsumerGroup(
        name=str(name),
        counters=_counters(fields.get("counters"), _NAME),
        held=fields["held"],
        staleness=_counters(fields.get("staleness"), _STALENESS),
    )


def _parse_need(value: Any, groups: int) -> Need:
    _require(isinstance(value, list) and len(value) == 5, "a need")
    place, moved, expiry, failed, reads = value
    _require(_is_count(place) and place < groups, "a need")
    _require(_is_count(failed) and _is_count(reads), "a need")
    _require(moved == "" or _is_status(moved), "a status")
    _require(_is_text(expiry, 64), "an expiry")
    return Need(place, str(moved), expiry, failed, reads)


def _parse_facts(value: Any, names: Sequence[str], *, sampled: bool) -> Facts:
    facts = _map(value, "a group's facts")
    _require(_REQUIRED_FACTS <= facts.keys() <= _REQUIRED_FACTS | _OTHER_FACTS, "a group's facts")
    _require(_is_status(facts["status"]), "a group's status")
    _require(all(_is_count(facts.get(name, 0)) for name in ("size", "samples", "reads")), "a count")
    _require(facts["size"] <= MAX_BLOB_BYTES and facts["samples"] <= MAX_SAMPLES, "a count")
    for name in ("version", "newest"):
        _require(type(facts.get(name, 0)) is int and abs(facts.get(name, 0)) < 2**63, "a version")
    tags = facts.get("tags", {})
    _require(isinstance(tags, dict) and tags.keys() <= set(names), "a group's tags")
    fit = all(_is_number(value) or _is_text(value, MOST_BYTES) for value in tags.values())
    _require(fit, "a group's tags")
    _require(_is_score(facts.get("score"), sampled=sampled), "a score")
    _require(_is_number(facts.get("priority", 0)), "a priority")
    return cast("Facts", facts)


def _parse_ending(head: Any) -> TaskEnd:
    fields = _map(head, "the end")
    for name in ("groups", "archived", "dead_letters"):
        _require(_is_count(fields.get(name)), "the end")
    waiting = fields.get("waiting")
    _require(isinstance(waiting, list) and all(map(_is_count, waiting)), "the end")
    return TaskEnd(**{name: fields[name] for name in TaskEnd.__slots__})


def _checked_sources(head: Any, last: int) -> SourceRecord:
    """Return the records of forwarded groups that a frame holds."""
    if not (isinstance(head, list) and len(head) == 3 and isinstance(head[2], dict)):
        raise ValueError("forwarded groups")
    origin, row, records = head
    if not (_matches(_ORIGIN, origin) and _matches(_ROW, row)):
        raise ValueError("the origin of forwarded groups")
    for seq, record in records.items():
        if not (
            _matches(_ID, seq) and _matches(_RECORD, record) and int(record.split()[0]) <= last
        ):
            raise ValueError("a forwarded group")
    return SourceRecord(origin, row, records)


def _matches(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None


class _Malformed(Exception):
    """A record has a form that redrb does not write."""


def _require(condition: object, what: str) -> None:
    if not condition:
        raise _Malformed(what)


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value == value


def _is_score(value: Any, *, sampled: bool) -> bool:
    if sampled:
        return _is_number(value) and 0 <= value <= MOST_WEIGHT
    return value in (None, "-arrival") or _is_number(value)


def _is_status(value: Any) -> bool:
    return isinstance(value, str) and value in _STATUSES


def _map(value: Any, what: str) -> dict[str, Any]:
    _require(isinstance(value, dict), what)
    return cast("dict[str, Any]", value)


def _counters(value: Any, names: re.Pattern[str]) -> dict[str, int]:
    for name, count in _map(value, "counters").items():
        _require(isinstance(name, str) and names.fullmatch(name), "counters")
        _require(type(count) is int and abs(count) <= _MAX_COUNT, "counters")
    return dict(value)


def _pairs(value: Any, longest: int) -> dict[str, str]:
    for name, text in _map(value, "pairs").items():
        _require(_is_text(name, longest) and _is_text(text, longest), "pairs")
    return dict(value)
