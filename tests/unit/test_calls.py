"""The calls of scripts, as Python declares them, are those that the scripts read and answer."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
import msgspec

import redrb
from redrb.lua.calls import Call, Page
from redrb.lua.scripts import load
from redrb.watch.groups.calls import Browse


def all_calls() -> list[type[Call[Any]]]:
    for module in pkgutil.walk_packages(redrb.__path__, "redrb."):
        if module.name.rpartition(".")[2] in ("calls", "entries", "origin", "turn"):
            importlib.import_module(module.name)
    found, new = set(), [Call]
    while new:
        new = [each for one in new for each in one.__subclasses__()]
        ours = (each for each in new if each.__module__.startswith("redrb."))
        found |= {each for each in ours if hasattr(each, "script")}
    return sorted(found, key=lambda call: call.script)


def reply_of(call: type[Call[Any]]) -> Any:
    (reply,) = get_args(call.__orig_bases__[0])
    return reply


def words(kind: Any) -> Iterator[str]:
    """Yield the words of outcomes in a type of replies."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield from words(get_type_hints(kind).get("outcome"))


def text_of(call: type[Call[Any]]) -> str:
    return load(call.script).text


ALL = all_calls()


def test_every_script_has_one_call():
    folder = Path(str(files("redrb.lua")))
    names = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.lua")}
    scripts = [call.script for call in ALL]
    assert scripts == sorted(name for name in names if not name.startswith("include/"))


def test_a_script_reads_all_fields_of_its_call_and_no_others():
    for call in ALL:
        fields = {field.name for field in msgspec.structs.fields(call)}
        assert set(re.findall(r"\bask\.(\w+)", text_of(call))) == fields, call


def test_a_script_answers_with_the_outcomes_that_its_call_declares():
    for call in ALL:
        reply = reply_of(call)
        said, text = set(words(reply)), text_of(call)
        own = files("redrb.lua").joinpath(f"{call.script}.lua").read_text("utf-8")
        assert {word for word in said if f"'{word}'" not in text} == set(), call
        assert set(re.findall(r"outcome = '(\w+)'", own)) <= said, call
        is_page = isinstance(reply, type) and issubclass(reply, Page)
        assert ("pack({more =" in own) <= is_page, call


def test_a_text_that_is_not_utf8_is_read_with_marks_and_hides_nothing_else():
    foreign = {"indexed": True, "groups": [{"seq": 1, "state": "leased", "slot": b"x\xff"}]}
    packed = msgpack.packb(foreign, use_bin_type=False)
    page = Browse("g", "newest", "", 5, "", []).read([packed, b""])
    assert (page.groups[0].seq, page.groups[0].slot) == (1, "x\ufffd")
