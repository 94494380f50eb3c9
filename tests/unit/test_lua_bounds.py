"""Every loop of a script has a bound that is declared: the server runs nothing else meanwhile.

A page is a number of `redrb/lua/pages.py`. What is read without a page, and each loop that is not
over something read, says in a comment `-- bound: ...`, on its line or the line above, by which page
or why it ends soon.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from redrb.lua.pages import PAGES

_ROOT = Path(str(files("redrb.lua")))
LUA = {
    str(path.relative_to(_ROOT).with_suffix("")): path.read_text("utf-8")
    for path in sorted(_ROOT.rglob("*.lua"))
}

CONSTANTS = {
    "include/pools": {
        "1000003": "seed of the dice",
        "2147483647": "seed of the dice",
    },
    "include/places": {
        "32": "2^32 mean distances, after which a double has 20 bits for one",
        "37": "bits of a weight",
    },
    "include/parts": {"49": "the character 1"},
    "assembly/add": {"49": "the character 1"},
    "include/scores": {"1e100": "largest weight, as in redrb/stream/orders"},
    "include/staleness": {"1023": "largest staleness that is counted by itself"},
    "include/staleness_counts": {"32": "largest staleness that is counted by itself in a report"},
    "include/search": {"1000000": "microseconds of a second"},
    "include/table": {"1000": "microseconds of a millisecond"},
    "include/records": {
        "15": "most elements of a short array of msgpack",
        "16": "fewest elements of a long array of msgpack",
        "144": "short array of msgpack",
        "220": "long array of msgpack",
        "160": "short text of msgpack",
        "217": "long text of msgpack",
        "256": "values of a byte",
        "48": "the character 0",
    },
    "include/put_record": {"53": "2^53, beyond which counting stands still"},
    "include/room": {"53": "2^53, beyond which counting stands still"},
    "include/task": {
        "1000": "ms of a second and us of a ms",
        "9007199254740992": "2^53, beyond which counting stands still",
        "40": "characters of a damaged number that an error names",
    },
    "include/weights": {
        "1000": "ms of a second and us of a ms",
        "1e15": "largest token that an attempt may have",
    },
    "include/claims": {"256": "values of a byte"},
    "include/clock": {"10": "a tenth of `most`"},
    "repair/puts": {"1000": "ms of a second"},
    "weights/begin": {"53": "of 2^53, as which larger numbers of foreign entries are reported"},
    "weights/discard": {"3600": "seconds for which a dropped token is remembered"},
}
"""Numbers of ten or more that bound no loop, by file, and what they are."""

_STRING = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
_NUMBER = re.compile(r"(?<![\w.%])\d+(?:\.\d+)?(?:e\d+)?")
_PLACE = re.compile(r"\b(?:ARGV|KEYS)\[[^\[\]]*\]|for i = \d+, #ARGV|#ARGV - \d+|\[i - \d+\]")
_TIME = re.compile(r"^local (?:[A-Z_]+_MS, )*[A-Z_]+_MS = ")
_NOTE = re.compile(r"-- bound: (\S.*)")

_LOOP = re.compile(r"\b(?:while|repeat)\b")
_COUNTED = re.compile(r"\bfor \w+ = (.*) do\b")
_LENGTH = re.compile(r"(?:\w+\(\) and )?#\w+(?:\[\d\])?(?:\.\w+)?(?: - \d)?(?: or \d)?")
_CALL = re.compile(r"redis\.call\('(\w+)'")
_HUGE = re.compile(r"[(,]\s*math\.huge\s*[,)]")

_WHOLE = ("HGETALL", "HKEYS", "HVALS", "SMEMBERS", "XINFO")
_LIMITS = {
    "XRANGE": "COUNT",
    "XREVRANGE": "COUNT",
    "HSCAN": "COUNT",
    "SSCAN": "COUNT",
    "ZSCAN": "COUNT",
    "ZRANGEBYSCORE": "LIMIT",
    "ZREVRANGEBYSCORE": "LIMIT",
    "ZRANGEBYLEX": "LIMIT",
}


def code_of(line: str) -> str:
    """Return a line without its comment; what strings hold stays."""
    at, end = 0, len(line)
    while at < end:
        string = _STRING.match(line, at)
        if string:
            at = string.end()
        elif line.startswith("--", at):
            return line[:at].rstrip()
        else:
            at += 1
    return line


def statements(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield number, code and note of each statement; one that goes on in further lines is one."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        first, code, notes = number, code_of(lines[number]), [lines[number]]
        if number:
            notes.append(lines[number - 1] if lines[number - 1].lstrip().startswith("--") else "")
        while _open(code) and number + 1 < len(lines) and number - first < 6:
            number += 1
            code += " " + code_of(lines[number]).strip()
            notes.append(lines[number])
        note = next((found[1] for found in map(_NOTE.search, notes) if found), "")
        if code.strip():
            yield first + 1, code.strip(), note
        number += 1


def _open(code: str) -> bool:
    """Return whether a call goes on in the next line."""
    bare = _STRING.sub("''", code)
    return bare.count("(") > bare.count(")") and "function(" not in bare


def unlimited(code: str) -> bool:
    """Return whether a statement reads, or goes through, something that no page bounds."""
    for call in _CALL.finditer(code):
        command, rest = call[1], code[call.end() :]
        if command in _WHOLE or (command in ("ZRANGE", "LRANGE") and ", -1)" in rest):
            return True
        one = re.match(r".*?, (\w+), \1\)", rest)  # from and to a place that is the same
        if command in _LIMITS and f"'{_LIMITS[command]}'" not in rest and not one:
            return True
    counted = _COUNTED.search(code)
    if counted:
        limit = re.split(r", (?![^(]*\))", counted[1])[1]
        if "PAGE." not in limit and not _LENGTH.fullmatch(limit):
            return True
    return bool(_LOOP.search(_STRING.sub("''", code)) or _HUGE.search(code))


def test_a_loop_says_what_bounds_it():
    missing = [
        f"{name}.lua:{number}: {code}"
        for name, text in LUA.items()
        for number, code, note in statements(text)
        if unlimited(code) and not note
    ]
    assert not missing, "add `-- bound: PAGE.name` or why it ends soon:\n" + "\n".join(missing)


def test_a_number_of_a_script_is_declared():
    """A number that bounds a loop is a page; a time ends in _MS; others are listed above."""
    undeclared = [
        (f"{name}.lua", number, each)
        for name, text in LUA.items()
        for number, code, _ in statements(text)
        for each in numbers_of(code)
        if each not in CONSTANTS.get(name, {})
    ]
    assert not undeclared, f"{undeclared}: declare them in redrb/lua/pages.py"


def numbers_of(code: str) -> list[str]:
    """Return the numbers of ten and more in a statement."""
    bare = _STRING.sub(lambda text: text[0][1:-1] if text[0][1:-1].isdigit() else "", code)
    found = [] if _TIME.match(bare) else _NUMBER.findall(_PLACE.sub("", bare))
    return [each for each in found if float(each) >= 10]


def test_pages_and_notes_are_those_that_exist():
    used = {
        page
        for text in LUA.values()
        for line in text.splitlines()
        for page in re.findall(r"PAGE\.(\w+)", code_of(line))
    }
    used |= {
        page
        for path in _ROOT.parent.rglob("*.py")
        for name in re.findall(r"PAGES\[([^\]]*)\]", path.read_text("utf-8"))
        for page in re.findall(r'"(\w+)"', name)
    }
    named = {page for text in LUA.values() for page in re.findall(r"PAGE\.(\w+)", text)}
    assert used == set(PAGES)
    assert named <= set(PAGES)
    assert set(CONSTANTS) <= set(LUA)
