"""One client for many threads: requests, errors, retries."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import (
    BusyLoadingError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as Broken

import redrb
from redrb import ConfigError, StoreUnavailable
from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.connection.transport import Pipeline, packed, read_replies
from redrb.errors import StoreError
from tests.samples import numbered
from tests.scenes import until


@pytest.mark.every_server
def test_binary_values_come_back_as_they_were(client, namespace):
    value = bytes(range(256)) * 40 + b"\r\n$5\r\n"
    client.execute("SET", namespace, value)
    assert client.execute("GET", namespace) == value


@pytest.mark.every_server
def test_a_pipeline_answers_in_order_and_keeps_errors_as_items(client, namespace):
    pipeline = Pipeline()
    pipeline.add("SET", namespace, "text")
    pipeline.add("INCR", namespace)
    pipeline.add_payload(packed("APPEND", namespace), 3, [b" and ", memoryview(b"more")], 9)
    pipeline.add("GET", namespace)
    stored, error, length, value = client.exchange(pipeline)
    assert stored == b"OK"
    assert isinstance(error, ResponseError)
    assert (length, value) == (13, b"text and more")


@pytest.mark.every_server
@pytest.mark.parametrize("sent_before", [False, True])
def test_scripts_go_by_their_sums_or_with_their_texts_and_payload_is_not_touched(
    client, namespace, sent_before
):
    text = "return {KEYS[1], ARGV[1]} -- %s"
    first, second = (text % f"{namespace} {number}" for number in range(2))
    sums = [hashlib.sha1(each.encode()).hexdigest() for each in (first, second)]
    called = b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % sums[0].encode()
    pipeline, odd = Pipeline(), called + sums[1].encode()
    pipeline.add_values([(namespace, [odd, memoryview(odd)], 2 * len(odd))])
    pipeline.add_payload(packed("APPEND", namespace), 3, [odd], len(odd))
    pipeline.add_script(sums[0], first, 1, namespace, odd)
    pipeline.add("GET", namespace)
    pipeline.add_script(sums[1], second, 1, namespace, odd)
    if sent_before:
        _, _, missing, _, missing_too = client.exchange(pipeline)
        assert {type(missing), type(missing_too)} == {NoScriptError}
    _, _, *replies = client.exchange(pipeline.with_texts())
    answer = [namespace.encode(), odd]
    assert replies == [answer, 3 * odd, answer]
    assert client.exchange(pipeline)[2:] == replies, "it is sent again"


@pytest.mark.every_server
def test_thousands_of_replies_come_in_order_however_they_are_cut(client, namespace):
    keys = [f"{{{namespace}}}:{number}" for number in range(1000)]
    pipeline = Pipeline()
    pipeline.add_values((key, [key.encode(), memoryview(b"x" * (7 * at))], len(key) + 7 * at)
                        for at, key in enumerate(keys))  # fmt: skip
    for number, key in enumerate(keys):
        pipeline.add("GET", key)
        if number % 100 == 0:
            pipeline.add("LPUSH", key, "no list")
    stored, *replies = client.exchange(pipeline)
    errors = [reply for reply in replies if isinstance(reply, ResponseError)]
    assert stored == b"OK"
    assert len(errors) == 10
    assert {type(replies[at]) for at in range(1, len(replies), 101)} == {type(errors[0])}
    found = [reply for reply in replies if isinstance(reply, bytes)]
    assert found == [key.encode() + b"x" * (7 * at) for at, key in enumerate(keys)]
    assert client.execute("GET", keys[1]) == found[1]


def test_a_reply_that_breaks_a_connection_is_raised_and_no_item():
    """Such as LOADING inside of a transaction: as an item it would count as an error of ours."""
    arrived = iter([b"QUEUED", BusyLoadingError("loading")])
    reader = SimpleNamespace(gets=lambda: next(arrived))
    connection: Any = SimpleNamespace(
        _parser=SimpleNamespace(_reader=reader), read_response=lambda: b"OK"
    )
    with pytest.raises(BusyLoadingError):
        read_replies(connection, 4)


@pytest.mark.every_server
def test_a_servers_error_is_ours_with_its_cause(client, namespace):
    client.execute("SET", namespace, "text")
    with pytest.raises(StoreError, match="not an integer") as caught:
        client.execute("INCR", namespace)
    assert isinstance(caught.value.__cause__, ResponseError)
    assert client.where in str(caught.value)


@pytest.mark.every_server
def test_replies_that_nobody_read_do_not_reach_the_next_request(client, namespace):
    def interrupted():
        with client.connection() as connection:
            connection.send_command("ECHO", "stale")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert client.execute("ECHO", "fresh") == b"fresh"


def test_an_outage_ends_when_its_kind_changes(client, caplog):
    """A node that was away comes back, and a slot moves from it: these are two outages."""
    failures = [Broken("reset"), Broken("reset"), TryAgainError("moving"), Broken("reset")]

    def attempt():
        if failures:
            raise failures.pop(0)
        return "done"

    assert client.retrying(attempt) == "done"
    logged = [re.sub(r"[0-9.]+ s", "N s", each) for each in caplog.messages]
    away, moves = (f"Redis at {client.where} {what}" for what in ("is away", "moves keys"))
    again = "a request is repeated for N s more"
    assert logged == [
        f"{away}: ConnectionError; {again}",
        f"recovered after N s: {away}",
        f"{moves}: TryAgainError; {again}",
        f"recovered after N s: {moves}",
        f"{away}: ConnectionError; {again}",
        f"recovered after N s: {away}",
    ]


def test_retries_end_in_time(client):
    attempts = 0

    def attempt():
        nonlocal attempts
        attempts += 1
        raise Broken("reset")

    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="reset") as caught:
        client.retrying(attempt, retry_s=0.3)
    assert 0.2 < time.monotonic() - started < 9  # the client's time is ten seconds
    assert attempts > 2
    assert caught.value.where == client.where
    assert caught.value.uncertain
    attempts = 0
    with pytest.raises(StoreUnavailable):
        client.retrying(attempt, retry_s=0)
    assert attempts == 1


def test_a_permanent_error_is_not_repeated(client):
    attempts = 0

    def attempt():
        nonlocal attempts
        attempts += 1
        raise ResponseError("WRONGTYPE")

    with pytest.raises(StoreError):
        client.retrying(attempt)
    assert attempts == 1


@pytest.mark.every_server
def test_hundreds_of_threads_may_wait_at_once(client, namespace):
    waiting = 150
    with ThreadPoolExecutor(waiting) as pool:
        futures = [pool.submit(client.once, "BLPOP", namespace, "10") for _ in range(waiting)]
        client.execute("RPUSH", namespace, *range(waiting))
        got = {int(future.result(timeout=20)[1]) for future in futures}
    assert got == set(range(waiting))


@pytest.mark.parametrize("landed", [False, True])
def test_an_outage_says_whether_an_earlier_attempt_may_have_landed(landed):
    client = redrb.connect(f"fake://{uuid.uuid4().hex}", retry_s=0.2)
    refused = Broken("Error 111 connecting to localhost:1. Connection refused.")
    failures = [*[Broken("Connection closed by server.")] * landed, *[refused] * 100]

    def attempt():
        raise failures.pop(0)

    with pytest.raises(StoreUnavailable) as caught:
        client.retrying(attempt)
    assert caught.value.uncertain is landed


def test_the_log_says_how_long_a_request_is_still_repeated(own_server, caplog):
    """It is the limit of the request, where that is shorter than the client's."""
    server = own_server()
    with redrb.connect(server.url, retry_s=60) as client:
        server.kill()
        with pytest.raises(StoreUnavailable):
            client.execute("PING", retry_s=0.3)
    first = next(record for record in caplog.records if "is away" in record.getMessage())
    assert re.search(r"a request ends in 0\.\d s, and the next one tries again", first.getMessage())


@pytest.mark.every_server
def test_a_server_that_evicts_keys_is_refused(own_server):
    server = own_server("--maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="has maxmemory-policy allkeys-lru"):
        redrb.connect(server.url)
    with redrb.connect(server.url, allow_eviction=True) as client:
        assert client.execute("PING") == b"PONG"


@pytest.mark.every_server
def test_a_server_that_evicts_keys_after_a_reconnect_is_refused(own_server):
    server = own_server()
    with redrb.connect(server.url) as client, redrb.connect(server.url) as admin:
        stream = redrb.ExperienceStream(client, "math")
        stream.put(numbered(1))
        admin.execute("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
        assert stream.put(numbered(2)) == (2,)
        admin.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(ConfigError, match="volatile-lru"):
            stream.put(numbered(3))
        admin.execute("CONFIG", "SET", "maxmemory-policy", "noeviction")
        assert stream.put(numbered(4)) == (3,)
        stream.close()


def test_a_fake_server_is_closed_while_another_thread_uses_it():
    client = redrb.connect(f"fake://{uuid.uuid4().hex}")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.once, "BLPOP", "nothing", 1)
        time.sleep(0.2)
        client.close()
        with suppress(RedisError, StoreError, AttributeError):  # fakeredis forgets its server
            assert waiting.result(30) is None


def test_a_connection_that_was_interrupted_after_its_reply_is_not_lent_again(real_url):
    stop = Stop(0.0)
    with redrb.connect(real_url) as client:
        with Deadline(stop=stop, budget=stop), client.connection():
            stop.begin()
            for interrupt in stop.interrupts:
                interrupt()
        assert client.once("PING") == b"PONG"


def text_of(reply: object) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def test_a_forked_child_breaks_no_request_of_its_parent(real_url, namespace):
    stop, found = Stop(0.0), []

    def wait():
        with Deadline(stop=stop, budget=stop):
            found.append(client.once("BLPOP", namespace, 20))

    with redrb.connect(real_url) as client:
        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: "cmd=blpop" in text_of(client.execute("CLIENT", "LIST")))
        child = os.fork()
        if child == 0:
            stop.end(thread, 10)
            os._exit(0)
        os.waitpid(child, 0)
        client.execute("RPUSH", namespace, "more")
        thread.join(10)
        assert found == [[namespace.encode(), b"more"]]


def test_a_thread_that_waits_for_redis_ends_at_once_when_it_is_asked(real_url, namespace):
    stop = Stop(0.0)

    def wait():
        with Deadline(stop=stop, budget=stop), suppress(StoreUnavailable):
            client.execute("BLPOP", namespace, 20)

    with redrb.connect(real_url) as client:
        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: stop.interrupts)
        stop.end(thread, 10)
        assert not thread.is_alive()
