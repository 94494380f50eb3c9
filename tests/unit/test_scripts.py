"""Scripts say what they take and return, touch only keys of their task, and load as they are."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from lupa.lua51 import LuaRuntime
from redis.exceptions import ResponseError

from redrb.connection.failures import name_scripts, translate
from redrb.lua import records
from redrb.lua.records import SEGMENT
from redrb.lua.scripts import assemble, load

_LUA_RUNTIME = LuaRuntime()
_ROOT = Path(str(files("redrb.lua")))
_LUA = {
    str(path.relative_to(_ROOT).with_suffix("")): path.read_text("utf-8")
    for path in _ROOT.rglob("*.lua")
}
PARTS = sorted(name for name in _LUA if name.startswith("include/"))
SCRIPTS = sorted(name for name in _LUA if not name.startswith("include/"))


def header(name: str) -> str:
    lines = []
    for line in _LUA[name].splitlines():
        if not line.startswith("--"):
            break
        lines.append(line)
    return "\n".join(lines)


def test_a_file_begins_with_what_it_is_for():
    """A script says what it takes and returns; a part what it is for."""
    assert {"put/put", "take/take", "take/finish"} <= set(SCRIPTS)
    assert [name for name in PARTS if not header(name)] == []
    for name in SCRIPTS:
        head = header(name)
        assert re.search(r"^-- KEYS", head, re.M), name
        assert re.search(r"^-- Returns ", head, re.M), name
        used = "ARGV" in _LUA[name].replace(head, "")
        assert bool(re.search(r"^-- ARGV", head, re.M)) == used, name


def test_every_key_is_derived_from_keys():
    for name, body in _LUA.items():
        calls = re.findall(r"redis\.p?call\(\s*'([A-Z]+)'\s*(?:,\s*([^,)]+))?", body)
        assert len(calls) == len(re.findall(r"redis\.p?call\(\s*'", body)), name
        for command, first in calls:
            # XGROUP and others: a word of its own comes before the key
            if command not in ("TIME", "XGROUP", "XINFO", "OBJECT"):
                assert not first.lstrip().startswith(("'", '"')), f"{name}: {command} {first}"
        for verb in re.findall(r"'XGROUP',\s*'[A-Z]+',\s*([^,)]+)", body):
            assert verb.strip() == "stream" or verb.strip().startswith("KEYS"), name


def test_scripts_are_small_and_leave_no_globals_and_no_clock():
    for name, body in _LUA.items():
        assert len(body.splitlines()) <= 180, name
        assert max(map(len, body.splitlines())) <= 110, name
        assert not re.search(r"^\s*function ", body, re.M), f"a function of {name} is global"
        assert not re.search(r"^[a-z_]+ *= ", body, re.M), f"a variable of {name} is global"
        assert not re.search(r"os\.(time|clock)", body), name
        # Redis seeds every script alike, so what draws must seed itself
        assert name == "include/pools" or "math.random" not in body, name


def test_a_script_loads_with_the_parts_that_it_names():
    for name in SCRIPTS:
        script = load(name)
        assert load(name) is script
        assert len(script.sha) == 40
        assert "--@" not in script.text, name
        main = " ".join(re.findall(r"^--@include (.*)$", _LUA[name], re.M)).split()
        for each in included(name):
            first = next(
                line.strip()
                for line in _LUA[each].splitlines()
                if line.strip() and not line.strip().startswith("--")
            )
            found = script.text.count(first)
            assert found == 1 if each.removeprefix("include/") in main else found, (name, each)


def test_a_script_has_fewer_local_variables_than_lua_allows():
    """Lua allows 200 at a time in the main part of a script; ten are left for the next change."""
    spare = "".join(f"local spare_{number}\n" for number in range(10))
    compiled = _LUA_RUNTIME.eval("function(text) return loadstring(text) ~= nil end")
    assert [name for name in SCRIPTS if not compiled(spare + load(name).text)] == []


def included(name: str) -> list[str]:
    lines = re.findall(r"^ *--@include (.*)$", _LUA[name], re.M)
    return [f"include/{each}" for line in lines for each in line.split()]


def all_included(name: str) -> set[str]:
    return {each for one in included(name) for each in {one, *all_included(one)}}


def code_of(name: str) -> str:
    return re.sub(r"--.*|'[^']*'", "", _LUA[name])


def defined(name: str) -> set[str]:
    """Names that a file defines for files that include it."""
    found = re.findall(r"^local (?:function )?([\w, ]+)", code_of(name), re.M)
    return {each.strip() for names in found for each in names.split(",")}


def test_a_file_includes_what_it_uses_and_nothing_else():
    for name in (*SCRIPTS, *PARTS):
        used = set(re.findall(r"(?<![.\w])[A-Za-z_]\w*", code_of(name))) - defined(name)
        needed = {each for each in all_included(name) if defined(each) & used}
        assert set(included(name)) == needed, name


def test_the_parts_of_a_segment_are_named_and_declared_once():
    """Nobody counts the places of a segment by hand: a script counts from 1, Python from 0."""
    for name, place in SEGMENT.items():
        assert getattr(records, name.upper()) == place - 1
    for name, body in _LUA.items():
        assert not re.search(r"(segment|record\[\w+\])\[\d", code_of(name)), name
        assert set(re.findall(r"\bSEGMENT\.(\w+)", body)) <= set(SEGMENT), name
    named = {part for body in _LUA.values() for part in re.findall(r"\bSEGMENT\.(\w+)", body)}
    assert named == set(SEGMENT)
    for path in _ROOT.parent.glob("table/*.py"):
        assert not re.search(r"segment\[\d|record of a row\"\)\[", path.read_text("utf-8")), path


def test_work_on_another_task_ends_where_it_returns():
    """A function that returns early must not leave what follows it on the keys of another task."""
    runtime = LuaRuntime()
    runtime.execute("KEYS = {'p:stream'}")
    script = """--@include elsewhere
local seen = {}
at_task('p:claims:a:', function()
  seen[1] = prefix .. ' ' .. stream .. ' ' .. key('facts')
  at_task('p:claims:b:', function()
    seen[2] = task
    if seen then return end
    seen = nil
  end)
  seen[3] = puts
  do return end
end)
return seen[1], seen[2], seen[3], prefix, stream, task, puts
"""
    assert runtime.execute(assemble("test", script).text) == (
        *("p:claims:a: p:claims:a:stream p:claims:a:facts", "p:claims:b:task", "p:claims:a:puts"),
        *("p:", "p:stream", "p:task", "p:puts"),
    )
    switching = {name for name in _LUA if re.search(r"\bwork_(at|on)\(", code_of(name))}
    assert switching <= {"include/elsewhere"}


READING = (
    "browse/groups",
    "doctor/examine",
    "ranks/read",
    "task/floor",
    "task/observe",
    "task/count",
    "saving/records",
    "table/look",
    "table/produced",
    "table/stats",
    "table/tags",
    "task/stats",
    "task/versions",
)


def test_a_script_of_a_task_or_of_weights_that_writes_begins_so():
    """At the memory limit, or while a cluster moves the slot, nothing of it is done."""
    for name in SCRIPTS:
        if re.search(r"^ *--@include (task|weights)", _LUA[name], re.M):
            body = _LUA[name].replace(header(name), "")
            written = r"'(X?ADD|X?DEL|HSET|HDEL|SET|ZADD|ZREM|R?PUSH|UNLINK|P?EXPIRE)'"
            assert not (name in READING and re.search(written, body)), name
            assert ("begin_writing()" in body) != (name in READING), name


@pytest.mark.parametrize(
    "reply",
    [
        "WRONGTYPE A string script: {sha}, on @user_script:{line}.",
        "WRONGTYPE A string script: {sha}, on @user_script: {line}.",
        "WRONGTYPE A string script: on @user_script:{line}.",  # Valkey 9
    ],
)
def test_an_error_names_the_file_and_line_of_the_script(reply):
    script = load("take/finish")
    line = script.text.splitlines().index("return cmsgpack.pack('lost')") + 1
    number = [each.strip() for each in _LUA["take/finish"].splitlines()].index(
        "return cmsgpack.pack('lost')"
    ) + 1
    error = ResponseError(reply.format(sha=script.sha, line=line))
    name_scripts(error, [script.sha])
    place = f"redrb/lua/take/finish.lua:{number}"
    assert str(translate(error, "here")).endswith(f": WRONGTYPE A string (at {place})")


def test_an_error_names_all_scripts_that_it_may_come_from():
    scripts = [load("take/finish"), load("take/take")]
    error = ResponseError("WRONGTYPE A string script: on @user_script:3.")
    name_scripts(error, [script.sha for script in scripts])
    places = " or ".join(script.sources[2] for script in scripts)
    assert str(translate(error, "here")).endswith(f": WRONGTYPE A string (at {places})")


def test_an_error_that_is_not_a_scripts_stays_as_it_is():
    error = ResponseError("WRONGTYPE A string")
    name_scripts(error, [load("take/finish").sha])
    assert str(error) == "WRONGTYPE A string"


def test_an_error_of_another_script_stays_as_it_is():
    reply = f"ERR no script: {'0' * 40}, on @user_script:3"
    assert str(translate(ResponseError(reply), "here")).endswith(reply)
