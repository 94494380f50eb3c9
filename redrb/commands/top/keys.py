"""Keys that a terminal sends, by name."""

from __future__ import annotations

import re

_NAMES = {
    "\r": "enter",
    "\n": "enter",
    "\t": "tab",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1b": "escape",
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "Z": "back tab",
    "1~": "home",
    "4~": "end",
    "5~": "page up",
    "6~": "page down",
    "7~": "home",
    "8~": "end",
}
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O[A-Za-z])|.", re.DOTALL)


def keys_in(data: bytes) -> list[str]:
    """Return the names of the keys in what was read from a terminal.

    A printable character is its own name. Keys without a name here are left out.
    """
    found = []
    for sequence in _SEQUENCE.findall(data.decode(errors="ignore")):
        if len(sequence) == 1:
            name = _NAMES.get(sequence, sequence if sequence.isprintable() else "")
        else:
            name = _NAMES.get(sequence[2:], "")
        if name:
            found.append(name)
    return found
