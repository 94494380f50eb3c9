"""The call of the script in `redrb/lua/saving`."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from redrb.lua.calls import Call
from redrb.stream.saving.records import Need


class Records(msgspec.Struct, frozen=True):
    """Records of groups; their facts come behind it, b"" of those that were deleted meanwhile.

    Attributes:
        last: Newest id of the task; -1: there is no such task.
        needs: Of each group, as in `GroupRecord`.
    """

    last: int
    needs: list[tuple[Need, ...]] = []


class ReadRecords(Call[Records], frozen=True):
    """Read the records of groups whose entries were read just before; writes nothing.

    Attributes:
        seqs: Ids of the groups, as texts.
    """

    script: ClassVar = "saving/records"
    groups: list[str]
    seqs: list[str]
