"""Short messages through a Redis stream: their order, the wait for one, their bounds."""

import threading
import time

import pytest

from redrb.connection import messages
from redrb.connection.messages import MessageReader, post
from redrb.errors import DecodeError, EncodeError


@pytest.fixture
def key(namespace):
    return f"redrb:{{{namespace}:messages}}:test"


def test_only_the_newest_message_stays_and_is_returned_once(client, key):
    reader = MessageReader(client, key)
    assert reader.newest() is None
    for number in range(3):
        post(client, [key], {"number": number})
    assert client.execute("XLEN", key) == 1
    assert reader.newest() == {"number": 2}
    assert reader.newest() is None
    assert MessageReader(client, key).newest() == {"number": 2}


def test_a_reader_waits_for_a_message(client, key):
    reader = MessageReader(client, key)
    began = time.monotonic()
    assert reader.newest(0.2) is None
    assert time.monotonic() - began >= 0.2
    timer = threading.Timer(0.1, post, (client, [key], {"a": 1}))
    timer.start()
    assert reader.newest(10) == {"a": 1}
    timer.join()


@pytest.mark.parametrize(
    "fields", [("m", b"\xc1"), ("m", b"\x01"), ("x", b"\x80"), ("m", b"\x81\xa1"), ("m", b"")]
)
def test_a_damaged_message_is_skipped(client, key, fields):
    client.execute("XADD", key, "*", *fields)
    reader = MessageReader(client, key)
    with pytest.raises(DecodeError, match="message in redrb:"):
        reader.newest()
    post(client, [key], {"a": 1})
    assert reader.newest() == {"a": 1}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"\x91" * 64 + b"\xc0", "more than 64 levels"),  # in a map, which is one level more
        (b"\x91" * 1000 + b"\xc0", "more than 64 levels"),
        (b"\xdd\x00\x04\x00\x00" + b"\x90" * (1 << 18), "more than 262144 lists"),
        (b"\xdd\xff\xff\xff\xff" + b"\x90" * 5000, "not valid msgpack"),
    ],
    ids=["65 levels", "1001 levels", "many", "a long claim"],
)
def test_a_deep_or_crowded_message_is_refused(client, key, value, why):
    client.execute("XADD", key, "*", "m", b"\x81\xa1a" + value)
    with pytest.raises(DecodeError, match=why):
        MessageReader(client, key).newest()


def test_messages_are_bounded(client, key, monkeypatch):
    post(client, [key], {"a": "b" * 100})
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 50)
    with pytest.raises(EncodeError, match="the limit is 50"):
        post(client, [key], {"a": "b" * 100})
    with pytest.raises(DecodeError, match="damaged"):
        MessageReader(client, key).newest()
