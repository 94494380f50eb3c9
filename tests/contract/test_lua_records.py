"""Records packed with cmsgpack in Lua are those of msgpack in Python, on fake and real servers."""

import math

import msgpack
import pytest

pytestmark = pytest.mark.every_server

REPACK = "return cmsgpack.pack(cmsgpack.unpack(ARGV[1]))"
SCORE = "return string.format('%.17g', cmsgpack.unpack(ARGV[1]).score)"


@pytest.mark.parametrize(
    "record",
    [
        {"size": 0, "samples": 8, "status": "completed", "score": 17.25},
        {"score": math.inf, "version": 2**53, "newest": -1, "tags": {"score": 0.1, "who": "Zoë"}},
        {"score": -math.inf, "tags": {"big": 3e300, "small": 5e-324}},
        [1, "two", [3.5, {"four": [True, False]}]],
    ],
)
def test_lua_keeps_a_record(client, record):
    packed = client.execute("EVAL", REPACK, 0, msgpack.packb(record))
    assert msgpack.unpackb(packed) == record


@pytest.mark.parametrize("score", [0.1, -1e300, 2.0**53 + 2, 1 / 3, math.inf])
def test_lua_sees_the_number_that_was_packed(client, score):
    assert float(client.execute("EVAL", SCORE, 0, msgpack.packb({"score": score}))) == score


def test_a_missing_field_is_nil_and_stays_missing(client):
    script = "local r = cmsgpack.unpack(ARGV[1]); r.b = r.a; r.a = nil; return cmsgpack.pack(r)"
    packed = client.execute("EVAL", script, 0, msgpack.packb({"a": 1, "c": None}))
    assert msgpack.unpackb(packed) == {"b": 1}
