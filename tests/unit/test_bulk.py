"""Replies straight into memory: whatever their size, wherever the network splits them."""

import contextlib
import itertools
import socket
import threading
import time
from pathlib import Path

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

import redrb
from redrb.connection.bulk import read_into, small_send_buffer
from redrb.connection.transport import Pipeline, packed, read_reply


class Server:
    """A server for one connection, which answers everything with given replies."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connection = redis.Connection(
            port=self.listener.getsockname()[1],
            socket_timeout=0.3,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            redis_connect_func=lambda made: made._parser.on_connect(made),  # without a handshake
        )
        accepting = threading.Thread(target=self.accept)
        accepting.start()
        self.connection.connect()
        accepting.join()

    def accept(self):
        self.peer, _ = self.listener.accept()
        self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @contextlib.contextmanager
    def sending(self, *parts, close=False, pause_s=0.0):
        def send():
            for part in parts:
                self.peer.sendall(part)
                if pause_s:
                    time.sleep(pause_s)
            if close:
                self.peer.close()

        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield self.connection
        finally:
            sender.join()

    def close(self):
        self.connection.disconnect()
        self.peer.close()
        self.listener.close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def segments_of(*sizes):
    return [memoryview(bytearray(size)) for size in sizes]


def string(value):
    return b"$%d\r\n%b\r\n" % (len(value), value)


def read(connection, *sizes):
    segments = segments_of(*sizes)
    length = read_into(connection, segments, sum(sizes))
    return length, b"".join(segments)


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (0, 5, 0), (1, 1, 1, 1, 1)])
def test_a_string_fills_the_segments(server, sizes):
    with server.sending(string(b"hello") + string(b"again")) as connection:
        assert read(connection, *sizes) == (5, b"hello")
        assert read(connection, *sizes) == (5, b"again")


def test_an_empty_value_is_received(server):
    with server.sending(b"$0\r\n\r\n" + string(b"x")) as connection:
        assert read(connection) == (0, b"")
        assert read(connection, 1) == (1, b"x")


def test_megabytes_go_to_where_they_belong(server):
    value = bytes(range(256)) * 20_000
    with server.sending(string(value) * 2) as connection:
        assert read(connection, 1_000_000, 0, 4_000_000, 120_000) == (len(value), value)
        assert read(connection, len(value)) == (len(value), value)


SPLIT = string(b"0123456789ab") + string(b"cdef")


@pytest.mark.parametrize("at", range(1, len(SPLIT)))
def test_replies_may_be_split_anywhere(server, at):
    with server.sending(SPLIT[:at], SPLIT[at:], pause_s=0.002) as connection:
        assert read(connection, 5, 7) == (12, b"0123456789ab")
        assert read(connection, 4) == (4, b"cdef")


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    values=st.lists(st.binary(max_size=300), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    shares=st.lists(st.integers(0, 300), max_size=4),
)
def test_any_values_in_any_parts(values, cuts, shares):
    stream = b"".join(map(string, values))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [stream[begin:end] for begin, end in itertools.pairwise(edges)]
    server = Server()
    with contextlib.closing(server), server.sending(*parts, pause_s=0.0002) as connection:
        for value in values:
            sizes, left = [], len(value)
            for share in shares:
                sizes.append(min(share, left))
                left -= sizes[-1]
            assert read(connection, *sizes, left) == (len(value), value)


@pytest.mark.parametrize(
    ("reply", "length"),
    [
        (b"$-1\r\n", -1),
        (b"$0\r\n\r\n", 0),
        (string(b"x"), 1),
        (string(b"x" * 99), 99),
        (string(b"x" * 101), 101),
        (string(b"x" * 5000), 5000),
    ],
)
def test_a_value_of_another_length_is_reported_and_not_read(server, reply, length):
    with server.sending(reply) as connection:
        found, value = read(connection, 100)
    assert (found, value) == (length, bytes(100))


@pytest.mark.parametrize("nbytes", [0, 1, 9, 10])
def test_a_missing_key_has_the_length_minus_one(server, nbytes):
    with server.sending(b"$-1\r\n") as connection:
        assert read(connection, nbytes)[0] == -1


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"-ERR some\r\n", redis.ResponseError),
        (b"-MOVED 7 127.0.0.1:7001\r\n", redis.exceptions.MovedError),
        (b"-ASK 7 127.0.0.1:7001\r\n", redis.exceptions.AskError),
        (b"-LOADING Redis is loading\r\n", redis.exceptions.BusyLoadingError),
        (b"-NOPERM this user has no permissions\r\n", redis.exceptions.NoPermissionError),
        (b"-OOM command not allowed\r\n", redis.exceptions.OutOfMemoryError),
        (b"-READONLY You can't write\r\n", redis.exceptions.ReadOnlyError),
        (b"-WRONGTYPE Operation\r\n", redis.ResponseError),
        (b"-ERR \xff not utf-8\r\n", redis.ResponseError),
        (b"-E\r\n", redis.ResponseError),
    ],
)
@pytest.mark.parametrize("nbytes", [10, 4 << 20])
def test_error_replies_are_raised_as_the_parser_does(server, reply, error, nbytes):
    with server.sending(reply) as connection, pytest.raises(error):
        read(connection, nbytes)


@pytest.mark.parametrize(
    "reply",
    [
        b"+OK\r\n",
        b":5\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"$x\r\n",
        b"$\r\n",
        b"x" * 2000,
        b"\r\n",
        b"$--1\r\n",
    ],
)
def test_a_reply_that_is_no_string_breaks_the_connection(server, reply):
    with server.sending(reply, close=True) as connection, pytest.raises(redis.ConnectionError):
        read(connection, 10)


@pytest.mark.parametrize("sent", [b"", b"$", b"$10", b"$10\r\n", b"$10\r\n01234", b"-ERR so"])
def test_a_connection_that_is_closed(server, sent):
    with server.sending(sent, close=True) as connection, pytest.raises(redis.ConnectionError):
        read(connection, 10)


@pytest.mark.parametrize("sent", [b"", b"$1", b"$10\r\n", b"$10\r\n01234", b"$10\r\n0123456789"])
def test_silence_is_a_timeout(server, sent):
    started = time.monotonic()
    with server.sending(sent) as connection, pytest.raises(redis.TimeoutError):
        read(connection, 10)
    assert 0.2 < time.monotonic() - started < 9


def test_a_reset_connection(server):
    server.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    server.peer.close()
    with pytest.raises(redis.ConnectionError):
        read(server.connection, 10)


def test_what_the_parser_has_read_ahead_is_not_lost(server):
    with server.sending(b"+OK\r\n" + string(b"ahead") + string(b"then")) as connection:
        time.sleep(0.05)  # all of it came together
        assert read_reply(connection) == b"OK"
        assert read(connection, 2, 3) == (5, b"ahead")
        assert read(connection, 4) == (4, b"then")


@pytest.mark.parametrize("reply", [b"$-1\r\n", b"-ERR some\r\n", string(b"longer")])
def test_other_replies_that_the_parser_has_read_ahead(server, reply):
    with server.sending(b"+OK\r\n" + reply) as connection:
        time.sleep(0.05)
        assert read_reply(connection) == b"OK"
        if reply[:1] == b"-":
            with pytest.raises(redis.ResponseError):
                read(connection, 5)
        else:
            assert read(connection, 5)[0] == (-1 if reply == b"$-1\r\n" else 6)


def test_the_parser_goes_on_on_the_same_connection(real_url, namespace):
    with redrb.connect(real_url) as client:
        value = bytes(range(256)) * 5000
        client.execute("SET", namespace, value)
        with client.connection() as connection:
            for _ in range(3):
                command = b"*4\r\n" + packed("GETRANGE", namespace, 0, len(value))
                connection.send_packed_command([command])
                assert read(connection, 999, len(value) - 999) == (len(value), value)
                pipeline = Pipeline()
                pipeline.add("STRLEN", namespace)
                pipeline.add("GET", namespace)
                pipeline.add("LRANGE", "none", 0, -1)
                assert pipeline.exchange(connection) == [len(value), value, []]
            first = connection
        with client.connection() as connection:
            assert connection is first
        client.execute("DEL", namespace)


def send_buffer(connection):
    return connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_the_send_buffer_is_small_while_large_values_are_sent(server):
    before = send_buffer(server.connection)
    with small_send_buffer(server.connection):
        assert send_buffer(server.connection) <= 512 << 10 < before
    assert send_buffer(server.connection) == min(before, 2 * _largest_send_buffer())


def test_other_connections_keep_their_send_buffer():
    ours, peer = socket.socketpair()  # a unix socket
    connection = redis.Connection()
    connection._sock = ours
    before = send_buffer(connection)
    with small_send_buffer(connection):
        assert send_buffer(connection) == before
    connection._sock = object()  # as of a fake server
    with small_send_buffer(connection):
        pass
    ours.close()
    peer.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_connection_that_breaks_has_no_send_buffer_to_restore(server, when):
    if when == "before":
        server.connection._sock.close()
    with small_send_buffer(server.connection):
        server.connection._sock.close()


def _largest_send_buffer():
    return int(Path("/proc/sys/net/core/wmem_max").read_text())
