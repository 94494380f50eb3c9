"""An error inside a Lua script names the file and the line of this repository."""

from __future__ import annotations

import re
import threading
from importlib.resources import files
from typing import ClassVar

import pytest
import redis

import redrb
from redrb.errors import StoreError, StoreUnavailable
from redrb.lua.calls import Call
from tests.samples import numbered

pytestmark = pytest.mark.every_server


class Nothing(Call[str], frozen=True):
    """A call without the fields that its script needs."""

    script: ClassVar = "weights/discard"


def _line(message: str) -> str:
    found = re.search(r"\(at redrb/lua/([a-z_/]+\.lua):(\d+)\)", message)
    assert found is not None, message
    lines = files("redrb.lua").joinpath(found[1]).read_text("utf-8").splitlines()
    return f"{found[1]}: {lines[int(found[2]) - 1].strip()}"


def test_an_error_of_a_script_names_file_and_line(real_url, namespace):
    with redrb.connect(real_url) as client:
        stream = redrb.ExperienceStream(client, "math", namespace=namespace)
        stream.put([numbered(1)])
        stream.take(1).release()
        client.execute("SET", f"redrb:{{{namespace}:math}}:leases:default", "a string")
        with pytest.raises(redrb.errors.StoreError, match="WRONGTYPE") as caught:
            stream.take(1)
        assert "user_script" not in str(caught.value)
        assert _line(str(caught.value)).startswith("take/take.lua: local leased = ")
        client.execute("DEL", f"redrb:{{{namespace}:math}}:leases:default")


def test_an_error_of_lua_names_file_and_line(real_url):
    with redrb.connect(real_url) as client:
        with pytest.raises(redrb.errors.StoreError, match="nil") as caught:
            Nothing().run(client, ["redrb:{none}:versions"])
        assert _line(str(caught.value)).startswith("include/weights.lua: local id = ")


def test_a_script_that_does_not_end_is_named_and_how_it_is_ended(own_server):
    server = own_server("--busy-reply-threshold", "20")

    def hang():
        with redrb.connect(server.url) as client, pytest.raises(StoreError, match=r"[Kk]ill"):
            client.execute("EVAL", "while true do end", 0)

    with (
        redrb.connect(server.url, retry_s=0.5) as client,
        redis.Redis.from_url(server.url, single_connection_client=True) as operator,
    ):
        operator.ping()  # a busy server greets no new connection of redis-py
        hanging = threading.Thread(target=hang)
        hanging.start()
        message = ""
        while "is busy with a script" not in message:
            try:
                client.execute("PING", retry_s=0)
            except StoreUnavailable as error:
                message = str(error)
        assert "SCRIPT KILL" in message
        assert "busy-reply-threshold" in message
        assert "firewall" not in message
        with pytest.raises(StoreUnavailable, match="SCRIPT KILL"):
            redrb.connect(server.url, retry_s=0.5)
        operator.script_kill()
        hanging.join(10)
        assert client.execute("PING") == b"PONG"
