"""The fake server compiles each Lua script once, and runs it as before."""

from __future__ import annotations

import uuid

import pytest

import redrb
from redrb.connection import fake
from redrb.errors import StoreError


def test_a_script_is_compiled_once_for_all_servers(monkeypatch):
    compiled: list[bytes] = []
    bytecode = fake._bytecode

    def noted(script, runtime):
        compiled.append(script)
        return bytecode(script, runtime)

    monkeypatch.setattr(fake, "_bytecode", noted)
    mark = uuid.uuid4().hex.encode()
    script = f"return {{'{mark.decode()}', ARGV[1], 1.5, nil}}"
    for _ in range(2):
        with redrb.connect(f"fake://{uuid.uuid4().hex}") as client:
            for argument in (b"a", b"b"):
                reply = client.execute("EVAL", script, 0, argument)
                assert reply == [mark, argument, 1]
    assert compiled.count(script.encode()) == 2  # once for each server, the second from bytecode
    assert fake._bytecodes[script.encode()].startswith(b"\x1bLua")


def test_an_error_names_its_line_at_every_call():
    script = f"local id = '{uuid.uuid4().hex}'\nerror('bad')"
    with redrb.connect(f"fake://{uuid.uuid4().hex}") as client:
        for _ in range(2):
            with pytest.raises(StoreError, match=":2: bad"):
                client.execute("EVAL", script, 0)
