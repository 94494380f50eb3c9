"""Checks of the records of forwarded groups in a saved task's file."""

from __future__ import annotations

import re
from typing import Any, Final

from redrb.stream.saving.records import SourceRecord

_ORIGIN: Final = re.compile(r"[^\x00-\x20]{1,1024}")
_ROW: Final = re.compile(r"[0-9a-f]{1,64} [0-9]{1,15} [0-9]{1,15}( ([0-9]{1,15}(,(?=.)|$))*)?")
_ID: Final = re.compile(r"[1-9][0-9]{0,14}")
_RECORD: Final = re.compile(r"([0-9]{1,15}) [0-9a-f]{16}")


def checked_sources(head: Any, last: int) -> SourceRecord:
    """Return the records of forwarded groups that a frame holds.

    Args:
        head: Head of the frame.
        last: Newest id of the saved task.

    Raises:
        ValueError: A record is malformed.
    """
    if not (isinstance(head, list) and len(head) == 3 and isinstance(head[2], dict)):
        raise ValueError("forwarded groups")
    origin, row, records = head
    if not (_matches(_ORIGIN, origin) and _matches(_ROW, row)):
        raise ValueError("the origin of forwarded groups")
    for seq, record in records.items():
        if not (_matches(_ID, seq) and _matches(_RECORD, record) and _stored_id(record) <= last):
            raise ValueError("a forwarded group")
    return SourceRecord(origin, row, records)


def _stored_id(record: str) -> int:
    return int(record.split()[0])


def _matches(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None
