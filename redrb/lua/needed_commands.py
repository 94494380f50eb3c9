"""The commands of Redis that scripts call, read from their text.

Redis checks each of them against the rights of the user who runs the script.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from redrb.lua.scripts import load

_CONTAINER = re.compile(r"'(XGROUP|XINFO)', '([A-Z]+)'")
_WORD = re.compile(r"'([A-Z]{3,})'")
_OPTIONS = frozenset({"COUNT", "FORCE", "JUSTID", "LIMIT", "WITHSCORES", "WITHVALUES"})


def scripts_in(folder: str) -> list[str]:
    """Return the names of the scripts in a folder, such as "take/take" in "take"."""
    found = files("redrb.lua").joinpath(folder).iterdir()
    return sorted(f"{folder}/{file.name[:-4]}" for file in found if file.name.endswith(".lua"))


@cache
def needed_commands(script: str) -> frozenset[str]:
    """Return the commands of a script such as "take/take", as ACL rules name them.

    Every quoted word in capitals is a command, unless it is an option of one. A container is
    followed by its subcommand: "xgroup|create".
    """
    text = load(script).text
    containers = {f"{name}|{part}" for name, part in _CONTAINER.findall(text)}
    words = set(_WORD.findall(_CONTAINER.sub("", text))) - _OPTIONS
    return frozenset(word.lower() for word in words | containers)
