"""The commands of Redis in the text of a script."""

from __future__ import annotations

import re

_CONTAINER = re.compile(r"'(MEMORY|XGROUP|XINFO)', '([A-Z]+)'")
_WORD = re.compile(r"'([A-Z]{3,})'")
_OPTIONS = frozenset({"COUNT", "FORCE", "JUSTID", "LIMIT", "SAMPLES", "WITHSCORES", "WITHVALUES"})


def commands_in(text: str) -> frozenset[str]:
    """Return the commands that a script calls, as ACL rules name them.

    Every quoted word in capitals is a command, unless it is an option of one. A container is
    followed by its subcommand: "xgroup|create".
    """
    containers = {f"{name}|{part}" for name, part in _CONTAINER.findall(text)}
    words = set(_WORD.findall(_CONTAINER.sub("", text))) - _OPTIONS
    return frozenset(word.lower() for word in words | containers)


def as_lua(commands: frozenset[str]) -> list[str]:
    """Return lines of a Lua table with a list of words for each command: {'XGROUP', 'CREATE'},."""
    words = (", ".join(f"'{word}'" for word in name.upper().split("|")) for name in commands)
    return sorted(f"{{{each}}}," for each in words)
