"""Loads the Lua scripts.

A script begins with a header: purpose, KEYS, ARGV, returns. A line `--@include name ...` names the
files of `redrb/lua/include` whose functions the lines below it call; the includes of these files
are found by themselves. Redis runs a script from its first line each time, and making the functions
of all files takes longer than most calls do: an include inside a block, indented like its lines, is
made only when the block runs, and known only there. `include/permissions.lua` gets the list of all
commands in the script's text, and in that of the scripts which a line `--@before name ...` names:
they run later for the same user, and do not check its permissions again. `PAGE.name` is a number of
`redrb.lua.pages`, `SEGMENT.name` one of `redrb.lua.records`; `TASK_KEYS.owner` and
`TABLE_KEYS.owner` are lists of names of `redrb.keys`. A reply that has cases begins with a word.
Repeated with the same arguments a script changes nothing more, so the client repeats it when a
connection breaks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from redrb.connection import failures
from redrb.keys import TABLE_KEYS, TASK_KEYS
from redrb.lua.commands import as_lua, commands_in
from redrb.lua.pages import PAGES
from redrb.lua.records import SEGMENT

_INCLUDE = "--@include "
_BEFORE = re.compile(r"^--@before (.*)$", re.MULTILINE)
_COMMANDS = "local commands = {}"
_DECLARED: dict[str, Mapping[str, int | tuple[str, ...]]] = {
    "PAGE": PAGES,
    "SEGMENT": SEGMENT,
    "TASK_KEYS": TASK_KEYS,
    "TABLE_KEYS": TABLE_KEYS,
}
_NAMED = re.compile(r"\b(PAGE|SEGMENT|TASK_KEYS|TABLE_KEYS)\.(\w+)")


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script as the server runs it.

    Attributes:
        text: The script behind its includes, without comments and indentation.
        sha: SHA-1 of `text`, the name under which a server caches it.
        sources: File and line of each line of `text`, such as "redrb/lua/take/take.lua:37".
    """

    text: str
    sha: str
    sources: tuple[str, ...]


@cache
def load(name: str) -> Script:
    """Return the script in `redrb/lua/<name>.lua`, such as "take/finish"."""
    script = assemble(name, _read(name))
    failures.note_script(script.sha, script.sources)
    return script


def assemble(name: str, source: str) -> Script:
    """Return the script with this source: its includes first, without comments."""
    lines = _lines(name, source)
    text = "\n".join(line for _, line in lines)
    text = _NAMED.sub(_declared, text)
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(text, sha, tuple(source for source, _ in lines))


def scripts_in(folder: str) -> list[str]:
    """Return the names of the scripts in a folder, such as "take/take" in "take"."""
    found = files("redrb.lua").joinpath(folder).iterdir()
    return sorted(f"{folder}/{file.name[:-4]}" for file in found if file.name.endswith(".lua"))


@cache
def needed_commands(script: str) -> frozenset[str]:
    """Return the commands of a script such as "take/take", which its user needs."""
    return commands_in(load(script).text)


def _lines(name: str, source: str) -> list[tuple[str, str]]:
    """Return the place and the code of each line of a script, before it has the pages' numbers."""
    return _with_commands(source, list(_with_includes(name, source, [])))


def _with_includes(
    name: str, source: str, known: list[tuple[int, str]], inside: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file, in the place of each include the files that it brings."""
    for number, line in enumerate(source.splitlines(), start=1):
        code = line.strip()
        depth = inside + len(line) - len(code)
        if code.startswith(_INCLUDE):
            for each in code.removeprefix(_INCLUDE).split():
                file = f"include/{each}"
                if file not in [one for _, one in known]:
                    yield from _with_includes(file, _read(file), known, depth)
                    known.append((depth, file))
        elif code and not code.startswith("--"):
            known[:] = [one for one in known if one[0] <= depth]
            yield f"redrb/lua/{name}.lua:{number}", code


def _with_commands(source: str, lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the lines of a script, with the list of the commands that it needs filled in."""
    if not any(code.startswith(_COMMANDS) for _, code in lines):
        return lines
    later = [load(each).text for names in _BEFORE.findall(source) for each in names.split()]
    listed = as_lua(commands_in("\n".join([*(code for _, code in lines), *later])))
    filled: list[tuple[str, str]] = []
    for place, code in lines:
        whole = [_COMMANDS[:-1], *listed, "}"] if code.startswith(_COMMANDS) else [code]
        filled += [(place, each) for each in whole]
    return filled


def _declared(named: re.Match[str]) -> str:
    value = _DECLARED[named[1]][named[2]]
    return str(value) if isinstance(value, int) else "{'" + "', '".join(value) + "'}"


def _read(name: str) -> str:
    return files("redrb.lua").joinpath(f"{name}.lua").read_text("utf-8")
