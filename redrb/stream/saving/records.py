"""The records of a saved task's file: every one is checked before anything is done with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from redrb.errors import DecodeError
from redrb.experience import Status
from redrb.stream.saving.file import Ending, Frame, Kind
from redrb.stream.saving.snapshot import ConsumerGroup, DeadRecord, GroupRecord, Need, TaskHeader
from redrb.stream.task.facts import Facts

MAX_GROUPS: Final = 4096
"""Most consumer groups."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MARK: Final = re.compile(r"[onfq][0-9]{1,4}")
_ENTRY_ID: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_REQUIRED_FACTS: Final = {"size", "samples", "status", "score"}
_OTHER_FACTS: Final = {"priority", "version", "newest", "reads", "tags"}


class _Malformed(Exception):
    """A record says what it may not say."""


def _need(condition: object, why: str) -> None:
    if not condition:
        raise _Malformed(why)


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and len(value) <= longest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _counts(value: Any, pattern: re.Pattern[str]) -> dict[str, int]:
    _need(isinstance(value, dict), "counters")
    for name, count in value.items():
        _need(_is_text(name, 64) and pattern.fullmatch(name) and type(count) is int, "counters")
        _need(abs(count) < 2**53, "counters")
    return dict(value)


def _pairs(value: Any, longest: int) -> dict[str, str]:
    _need(isinstance(value, dict), "pairs")
    for name, text in value.items():
        _need(_is_text(name, longest) and _is_text(text, longest), "pairs")
    return dict(value)


def _consumer_group(value: Any) -> ConsumerGroup:
    _need(isinstance(value, dict), "a consumer group")
    own: dict[str, Any] = value
    name, held = own.get("name"), own.get("held")
    _need(_is_text(name, 128) and re.fullmatch(r"[A-Za-z0-9._/@+-]+", str(name)), "a group's name")
    _need(_is_count(held), "a group's count")
    return ConsumerGroup(
        str(name),
        _counts(own.get("counters"), _NAME),
        int(str(held)),
        _counts(own.get("staleness"), _MARK),
    )


def parse_header(head: Any) -> TaskHeader:
    """Return the header that a frame holds."""
    _need(isinstance(head, dict), "header")
    own: dict[str, Any] = head
    groups = own.get("groups")
    _need(isinstance(groups, list) and len(groups) <= MAX_GROUPS, "consumer groups")
    _need(_is_text(own.get("task"), 128), "the name")
    _need(_is_count(own.get("saved_ms")) and _is_count(own.get("terms")), "counts")
    settings = _pairs(own.get("settings"), 1 << 16)
    _need(all(map(_NAME.fullmatch, settings)), "settings")
    parsed = tuple(map(_consumer_group, groups or ()))
    _need(len({group.name for group in parsed}) == len(parsed), "a consumer group twice")
    return TaskHeader(
        task=own["task"],
        saved_ms=own["saved_ms"],
        settings=settings,
        counters=_counts(own.get("counters"), _NAME),
        groups=parsed,
        terms=own["terms"],
    )


def parse_group(head: Any, groups: int, tags: Sequence[str]) -> GroupRecord:
    """Return the record of a group that a frame holds.

    Args:
        head: Head of the frame.
        groups: Number of consumer groups.
        tags: Names of the declared tags.
    """
    _need(isinstance(head, list) and len(head) == 4, "a group")
    seq, facts, archived, needs = head
    _need(_is_count(seq) and seq > 0, "a group")
    _need(
        archived == "" or (_is_text(archived, 20) and re.fullmatch(r"[0-9]+", archived)), "a time"
    )
    _need(isinstance(needs, list) and len(needs) <= groups, "a group's needs")
    found = []
    for need in needs:
        _need(isinstance(need, list) and len(need) == 5, "a need")
        place, moved, expiry, failed, reads = need
        _need(_is_count(place) and place < groups, "a need")
        _need(_is_count(failed) and _is_count(reads), "a need")
        _need(moved == "" or moved in set(Status), "a status")
        _need(_is_text(expiry, 64), "an expiry")
        found.append(Need(place, str(moved), expiry, failed, reads))
    _need(len({need.place for need in found}) == len(found), "a need twice")
    described = None if facts is None else parse_facts(facts, tags)
    return GroupRecord(seq, described, archived, tuple(found))


def parse_facts(value: Any, names: Sequence[str]) -> Facts:
    """Return what an indexed task keeps of a group."""
    _need(isinstance(value, dict), "a group's facts")
    facts: dict[str, Any] = value
    _need(_REQUIRED_FACTS <= facts.keys() <= _REQUIRED_FACTS | _OTHER_FACTS, "a group's facts")
    _need(facts["status"] in set(Status), "a group's status")
    _need(all(_is_count(facts.get(name, 0)) for name in ("size", "samples", "reads")), "a count")
    for name in ("version", "newest"):
        _need(type(facts.get(name, 0)) is int and abs(facts.get(name, 0)) < 2**63, "a version")
    tags = facts.get("tags", {})
    _need(isinstance(tags, dict) and tags.keys() <= set(names), "a group's tags")
    for number in (facts["score"], facts.get("priority", 0), *tags.values()):
        _need(type(number) in (int, float) and number == number, "a group's numbers")
    return cast("Facts", facts)


def parse_dead(frame: Frame) -> DeadRecord:
    """Return the dead letter that a frame holds."""
    _need(isinstance(frame.head, list) and len(frame.head) == 3, "a dead letter")
    entry_id, fields, has_payload = frame.head
    _need(_is_text(entry_id, 41) and _ENTRY_ID.fullmatch(entry_id), "a dead letter's id")
    _need(isinstance(fields, list) and len(fields) <= 64, "a dead letter")
    for pair in fields:
        _need(isinstance(pair, list) and len(pair) == 2, "a dead letter")
        _need(all(isinstance(word, bytes) for word in pair), "a dead letter")
    own = tuple((name, value) for name, value in fields)
    return DeadRecord(entry_id, (*own, (b"g", frame.payload)) if has_payload is True else own)


def _parse_end(head: Any) -> Ending:
    _need(isinstance(head, dict), "end")
    own: dict[str, Any] = head
    for name in ("groups", "archived", "dead_letters"):
        _need(_is_count(own.get(name)), "end")
    for name in ("waiting", "cursors"):
        value = own.get(name)
        _need(isinstance(value, list) and all(map(_is_count, value)), "end")
    return Ending(**{name: own[name] for name in Ending.__slots__})


class Contents:
    """Checks the records of a file as they come, and counts them.

    Attributes:
        header: The task without its groups.
        ending: What the end of the file says; set when all of it was checked.
    """

    header: TaskHeader
    ending: Ending

    def __init__(self, where: str) -> None:
        self._where = where
        self._begun = False
        self._seq = 0
        self._letter = (0, 0)
        self._tags: Sequence[str] = ()
        self._counted: list[int] = [0, 0, 0]
        self._waiting: list[int] = []

    def add(self, frame: Frame) -> GroupRecord | DeadRecord | dict[str, str] | None:
        """Check one frame; returns the record that it holds.

        Raises:
            DecodeError: It may not be there, or not say that.
        """
        try:
            return self._add(frame)
        except _Malformed as error:
            raise DecodeError(
                f"{self._where} is malformed, though it is whole: {error}. It was not written by "
                "redrb."
            ) from error

    def _add(self, frame: Frame) -> GroupRecord | DeadRecord | dict[str, str] | None:
        _need(self._begun != (frame.kind is Kind.HEADER), "the header")
        if frame.kind is Kind.HEADER:
            self._begin(parse_header(frame.head))
            return None
        if frame.kind is Kind.GROUP:
            return self._group(parse_group(frame.head, len(self.header.groups), self._tags))
        if frame.kind is Kind.DEAD_LETTER:
            return self._dead_letter(parse_dead(frame))
        if frame.kind is not Kind.END:
            pairs = _pairs(frame.head, 2048)
            shape = r"[1-9][0-9]{0,15}" if frame.kind is Kind.TERMS else r"[0-9]+ [0-9]+ [0-9]+"
            _need(all(re.fullmatch(shape, value) for value in pairs.values()), "pairs")
            return pairs
        self.ending = _parse_end(frame.head)
        ending = self.ending
        told = [ending.groups, ending.archived, ending.dead_letters]
        _need(told == self._counted and ending.waiting == self._waiting, "the number of records")
        _need(len(ending.cursors) == len(self._waiting), "cursors")
        return None

    def _begin(self, header: TaskHeader) -> None:
        self._begun, self.header = True, header
        self._waiting = [0] * len(header.groups)
        self._tags = tag_names(header.settings)
        _need(header.last >= 0, "the last id")

    def _group(self, record: GroupRecord) -> GroupRecord:
        _need(self._seq < record.seq <= self.header.last, "the order of groups")
        _need((record.facts is not None) == self.header.indexed, "a group's facts")
        _need(not (record.archived and record.needs), "history that is needed")
        self._seq = record.seq
        self._counted[0] += 1
        self._counted[1] += record.archived != ""
        for need in record.needs:
            self._waiting[need.place] += 1
        return record

    def _dead_letter(self, record: DeadRecord) -> DeadRecord:
        ms, _, number = record.entry_id.partition("-")
        _need(self._letter < (int(ms), int(number)), "the order of dead letters")
        _need(record.fields, "a dead letter")
        self._letter = (int(ms), int(number))
        self._counted[2] += 1
        return record


def tag_names(settings: Mapping[str, str]) -> Sequence[str]:
    """Return the tags that a task declares."""
    try:
        names = json.loads(settings.get("tags") or "[]")
    except ValueError as error:
        raise _Malformed("tags") from error
    _need(isinstance(names, list) and all(_is_text(name, 128) for name in names), "tags")
    return tuple(names)
