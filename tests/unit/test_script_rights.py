"""Scripts check the rights of their user first; each command that is sent is in those of a role."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from redrb.cli.arguments import ROLES
from redrb.cli.roles import permissions
from redrb.lua.commands import as_lua, commands_in
from redrb.lua.scripts import load, scripts_in

FOLDERS = tuple("admission put assembly session take ranks task saving weights table".split())
READING = (
    *("saving/records", "task/count", "task/floor", "task/observe", "task/stats", "task/versions"),
    *("ranks/read", "table/look", "table/produced", "table/stats", "table/tags"),
)
SINGLE_WRITE = ("weights/follow", "weights/renew_pin", "table/watch")
CHECKED_BEFORE = {
    "take/finish": "take/take",
    "take/recheck": "take/take",
}
"""Scripts that run only after another one, which checks their rights."""

ALL = [name for folder in FOLDERS for name in scripts_in(folder)]


def listed_in(name: str) -> frozenset[str]:
    """Return the commands whose rights a script checks."""
    found = re.search(r"local commands = \{\n(.*?)\n\}\n", load(name).text, re.DOTALL)
    return commands_in(found[1]) if found else frozenset()


def test_a_script_that_writes_checks_all_commands_that_it_calls():
    for name in ALL:
        if name in (*READING, *SINGLE_WRITE):
            assert not listed_in(name), name
            continue
        checked, text = listed_in(CHECKED_BEFORE.get(name, name)), load(name).text
        called = set(re.findall(r"redis\.call\('(\w+)'", text)) - {"XGROUP", "XINFO"}
        called |= set(re.findall(r"in_parts\(.*?'([A-Z]+)'", text))
        called |= set(re.findall(r"= \{'(X[A-Z]+)'", text))
        assert called, name
        assert {each.lower() for each in called} <= checked, name
        assert commands_in(text) <= checked, name


def test_rights_are_checked_before_the_first_write():
    for name in filter(listed_in, ALL):
        text = Path(str(files("redrb.lua"))).joinpath(f"{name}.lua").read_text("utf-8")
        body = re.sub(r"\blocal function.*?^end$|--.*$", "", text, flags=re.DOTALL | re.MULTILINE)
        check = re.search(r"check_permissions\(|forbidden_command\(", text)
        written = re.search(r"'(H?SET|HSETNX|X?ADD|X?DEL|ZADD|SADD|RPUSH|UNLINK)'|\bjoin\(", body)
        assert check, name
        assert not written or check.start() < text.index(written[0]), name


OF_THE_SERVER = {"acl", "config"}
"""Commands of whoever keeps the server; whoever sends them goes on where they are refused."""

SENDS = ("execute", "once", "add")
"""Names of methods whose first argument is a command."""


def sent_commands() -> Iterator[str]:
    """Yield the commands that the package sends beside its scripts."""
    for path in Path(str(files("redrb"))).rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in SENDS:
                match call.args[:1]:
                    case [ast.Constant(str(command))] if command.isupper():
                        yield command.lower()


def test_each_command_that_is_sent_is_in_the_rights_of_a_role():
    words: set[str] = set()
    for role in ROLES:
        named = ([], []) if role == "weight-reader" else (["math"], ["rows"])
        words.update(permissions(role, named[0], "default", "policy", None, named[1]).split())
    allowed = {word.strip("()").removeprefix("+").partition("|")[0] for word in words}
    sent = set(sent_commands())
    assert {"type", "blpop", "xread"} < sent
    assert sent - OF_THE_SERVER <= allowed


def test_commands_as_acl_rules_and_as_lua():
    text = "redis.call('XGROUP', 'CREATE', stream) redis.call('HSET', 'x', 'COUNT')"
    assert commands_in(text) == {"xgroup|create", "hset"}
    assert as_lua(commands_in(text)) == [
        "{'HSET', words = 4},",
        "{'XGROUP', 'CREATE', words = 5},",
    ]
    assert commands_in("\n".join(as_lua(commands_in(text)))) == commands_in(text)
