"""The commands of Redis that scripts call, read from their text.

Redis checks each of them against the rights of the user who runs the script.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from redrb.lua.commands import commands_in
from redrb.lua.scripts import load


def scripts_in(folder: str) -> list[str]:
    """Return the names of the scripts in a folder, such as "take/take" in "take"."""
    found = files("redrb.lua").joinpath(folder).iterdir()
    return sorted(f"{folder}/{file.name[:-4]}" for file in found if file.name.endswith(".lua"))


@cache
def needed_commands(script: str) -> frozenset[str]:
    """Return the commands of a script such as "take/take", as ACL rules name them."""
    return commands_in(load(script).text)
