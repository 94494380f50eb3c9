"""Addresses that redrb prints: those of IPv6 stand in brackets, and none has a password."""

from __future__ import annotations

import socket

import msgspec
import pytest

from redrb.errors import ConfigError
from redrb.stream.announcement import (
    MOST_ADDRESS,
    MOST_BYTES,
    MOST_FAULT,
    MOST_NAME,
    Announcement,
    packed,
)
from redrb.train.engines import VLLMEngine
from redrb.watch.page.server import bound_socket
from redrb.words import bracketed, is_loopback


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    assert bracketed("::1") == "[::1]"
    assert [bracketed(each) for each in ("localhost", "127.0.0.1")] == ["localhost", "127.0.0.1"]


def test_only_this_machine_reaches_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "", "10.0.0.1", "localhost.example")))


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://[::1]/", "http://[::1]"),
        ("https://user:s3cret@host:8000/v1", "https://host:8000/v1"),
        ("http://proxy/vllm-1/?key=s3cret#part", "http://proxy/vllm-1"),
        ("http://host", "http://host"),
    ],
)
def test_an_engine_is_named_by_its_address(url: str, where: str) -> None:
    assert VLLMEngine(url, model="m").where == where


@pytest.mark.parametrize("letter", ["h", "\U0001f600"])
def test_the_longest_address_fits_into_an_announcement(letter: str) -> None:
    names = dict.fromkeys(("label", "host", "program", "weights_name"), letter * MOST_NAME)
    numbers = dict.fromkeys(("pid", "groups", "samples", "filtered", "leased", "rights"), 2**62)
    engine, fault = letter * MOST_ADDRESS, letter * MOST_FAULT
    said = Announcement(role="maker", **names, **numbers, engine=engine, fault=fault)
    sent = packed(said)
    assert len(sent) <= MOST_BYTES
    found = msgspec.msgpack.decode(sent, type=Announcement)
    assert (found.label, found.engine) == (said.label, engine if letter == "h" else "")


def test_an_address_that_is_taken_is_named_as_a_url_has_it() -> None:
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    with socket.socket(socket.AF_INET6) as taken:
        try:
            taken.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"served at \[::1\]:{port}: "):
            bound_socket("::1", port)
