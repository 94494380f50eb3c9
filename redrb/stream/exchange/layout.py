"""Names and limits of the files in an exported directory."""

from __future__ import annotations

import re
from typing import Final

FORMAT: Final = 1
ABOUT: Final = "export.json"
GROUPS: Final = "groups.jsonl"
SHARD_BYTES: Final = 256 << 20
"""Most bytes of tensors in one file, unless a single group is larger."""
MAX_LINE_BYTES: Final = 512 << 20

_SHARD: Final = re.compile(r"tensors-[0-9]{5,9}\.safetensors")


def shard_name(number: int) -> str:
    """Return the name of a file of tensors."""
    return f"tensors-{number:05d}.safetensors"


def is_shard(name: object) -> bool:
    """Return whether this may be the name of a file of tensors in the directory itself."""
    return isinstance(name, str) and _SHARD.fullmatch(name) is not None


def key_of(group: int, sample: int, field: str) -> str:
    """Return the name of a tensor in its file."""
    return f"{group}/{sample}/{field}"
