"""Connecting to real servers, and the errors when that fails."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import redrb
from redrb import ExperienceStream, StoreUnavailable
from redrb.cli.__main__ import main
from redrb.connection import connecting
from redrb.connection.server_cli import cli_options
from redrb.errors import ConfigError, StoreDenied, UnsupportedServer
from tests.conftest import REAL
from tests.samples import numbered, numbers
from tests.servers import Server, free_port, make_certificate, with_tls

SECRET = "hunter2"


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """Listen on loopback: answer every connection with these bytes, or never accept one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer, args=(server, answer))
        if answer is not None:
            thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        if answer is not None:
            thread.join()


def _answer(server: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(2)
            connection.recv(4096)
            connection.sendall(answer)


def test_a_server_tells_its_version(real_url):
    with redrb.connect(real_url) as client:
        info = client.execute("INFO", "server").decode()
        version = ".".join(map(str, client.server_version))
        assert f"_version:{version}\r\n" in info
        assert client.url == real_url


def test_the_url_comes_from_the_environment(real_url, monkeypatch):
    monkeypatch.setenv("REDRB_URL", real_url)
    with redrb.connect() as client:
        assert client.url == real_url
    monkeypatch.delenv("REDRB_URL")
    with pytest.raises(ConfigError, match="REDRB_URL"):
        redrb.connect()


def test_a_port_without_a_server_is_an_error_at_once():
    port = free_port()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}") as caught:
        redrb.connect(f"redis://:{SECRET}@127.0.0.1:{port}/0")
    assert time.monotonic() - started < 15
    assert caught.value.where == f"127.0.0.1:{port}/0"
    assert SECRET not in str(caught.value)


def test_a_host_without_an_address_is_unavailable():
    with pytest.raises(StoreUnavailable):
        redrb.connect("redis://host.invalid", connect_timeout=2)


def test_a_server_that_never_answers_is_given_up_in_time():
    with listening(None) as port:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            redrb.connect(f"redis://127.0.0.1:{port}", connect_timeout=0.3)
        assert 0.25 < time.monotonic() - started < 15  # sockets wait for 20 s otherwise


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"+OK\r\n",
    ],
    ids=["http", "ssh", "status"],
)
def test_a_server_that_does_not_speak_redis_is_refused(answer):
    with listening(answer) as port, pytest.raises(UnsupportedServer, match="protocol"):
        redrb.connect(f"redis://127.0.0.1:{port}", connect_timeout=2)


def test_a_server_that_hangs_up_is_unavailable():
    with listening(b"") as port, pytest.raises(StoreUnavailable):
        redrb.connect(f"redis://127.0.0.1:{port}", connect_timeout=2)


@pytest.mark.parametrize(
    ("scheme", "answer", "advice"),
    [
        ("redis", b"", "write rediss://"),
        ("redis", b"\x15\x03\x03\x00\x02\x02\x46", "needs rediss://"),  # a TLS alert
        ("rediss", b"-ERR unknown command\r\n", "write redis://"),
        ("rediss", None, "write redis://"),
        ("rediss", b"", "write redis://"),
    ],
)
def test_tls_on_one_side_only_is_named(scheme, answer, advice):
    with (
        listening(answer) as port,
        pytest.raises((StoreUnavailable, UnsupportedServer), match=advice),
    ):
        redrb.connect(f"{scheme}://127.0.0.1:{port}", connect_timeout=0.5)


def test_a_server_that_does_not_know_hello_is_too_old():
    reply = b"-ERR unknown command `HELLO`, with args beginning with: `2`,\r\n"
    with listening(reply) as port, pytest.raises(UnsupportedServer, match=r"7\.0 or newer"):
        redrb.connect(f"redis://127.0.0.1:{port}", connect_timeout=2)


def test_an_old_server_is_refused_with_its_version(real_url, monkeypatch):
    monkeypatch.setattr(connecting, "OLDEST_SERVER", (99, 0))
    with pytest.raises(UnsupportedServer, match=r"is \d+\.\d+\.\d+: redrb needs"):
        redrb.connect(real_url)


@pytest.fixture(scope="module", params=list(REAL))
def guarded(request):
    """A server that wants a password, and knows a user with few keys and one with few commands."""
    server = Server(REAL[request.param])
    with redrb.connect(server.url) as client:
        for name, rules in {
            "maker": "~redrb:* +@all -@admin",
            "stranger": "~other:* +@all",
            "reader": "~* +@read +@connection",
        }.items():
            client.execute("ACL", "SETUSER", name, "on", f">{SECRET}", *rules.split())
        client.execute("CONFIG", "SET", "requirepass", SECRET)
    yield server
    server.close()


@pytest.mark.parametrize("login", ["", "wrong:", ":wrong", "maker:wrong", "nobody:" + SECRET])
def test_a_wrong_password_is_denied_and_not_shown(guarded, login):
    given = f"{login}@" if login else ""
    with pytest.raises(StoreDenied, match="user and password") as caught:
        redrb.connect(f"redis://{given}127.0.0.1:{guarded.port}", retry_s=5)
    assert "wrong@" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("allow_eviction", [False, True])
def test_a_missing_password_is_named_first(guarded, allow_eviction):
    with pytest.raises(StoreDenied, match=r"^the password is missing: .*REDRB_URL"):
        redrb.connect(f"redis://127.0.0.1:{guarded.port}", allow_eviction=allow_eviction)


@pytest.mark.parametrize("login", [f":{SECRET}", f"default:{SECRET}", f"maker:{SECRET}"])
def test_a_user_with_its_password_and_keys_works(guarded, login):
    url = f"redis://{login}@127.0.0.1:{guarded.port}/0"
    with redrb.connect(url) as client, ExperienceStream(client, "math") as stream:
        stream.put(numbered(1))
        with stream.take(1, timeout=0) as lease:
            assert numbers(lease) == [1]
        assert SECRET not in repr(client) + repr(stream)


@pytest.mark.parametrize("user", ["stranger", "reader"])
def test_a_user_without_the_keys_or_commands_is_denied(guarded, user):
    url = f"redis://{user}:{SECRET}@127.0.0.1:{guarded.port}/0"
    started = time.monotonic()
    with redrb.connect(url, retry_s=30) as client, pytest.raises(StoreDenied, match="redrb:"):
        ExperienceStream(client, "math")
    assert time.monotonic() - started < 25  # the client's time is 30 s


def test_a_password_that_changes_meanwhile_is_denied_at_once(own_server):
    server = own_server()
    with redrb.connect(server.url, retry_s=30) as client:
        stream = ExperienceStream(client, "math")
        with redrb.connect(server.url) as admin:
            admin.execute("CONFIG", "SET", "requirepass", SECRET)
            admin.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        started = time.monotonic()
        with pytest.raises(StoreDenied):
            stream.put(numbered(1))
        assert time.monotonic() - started < 25  # the client's time is 30 s


def test_a_unix_socket_is_reached(own_server, tmp_path):
    path = tmp_path / "redis.sock"
    server = own_server("--unixsocket", str(path))
    with redrb.connect(f"unix://{path}") as client:
        assert client.where == f"unix://{path}"
        client.execute("SET", "here", "yes")
    with redrb.connect(server.url) as client:
        assert client.execute("GET", "here") == b"yes"
    with pytest.raises(StoreUnavailable, match="missing"):
        redrb.connect(f"unix://{tmp_path}/missing.sock")


def test_databases_of_a_server_are_apart(own_server):
    server = own_server()
    with (
        redrb.connect(f"redis://127.0.0.1:{server.port}/1") as one,
        redrb.connect(f"redis://127.0.0.1:{server.port}/2") as two,
    ):
        ExperienceStream(one, "math").put(numbered(1))
        assert len(ExperienceStream(one, "math")) == 1
        assert len(ExperienceStream(two, "math")) == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A directory with key.pem and a certificate cert.pem that it signed itself."""
    directory = tmp_path_factory.mktemp("tls")
    make_certificate(directory)
    return directory


def speak_tls(server, port, certificate, *, clients):
    """Let a server listen with TLS, too; `clients`: whether these show a certificate."""
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    files = ("tls-cert-file", cert, "tls-key-file", key, "tls-ca-cert-file", cert)
    with redrb.connect(server.url) as client:
        client.execute("CONFIG", "SET", "tls-auth-clients", clients, "tls-port", port, *files)


@pytest.mark.parametrize("own_server", with_tls(), indirect=True)
def test_tls_is_checked_against_the_certificate(own_server, certificate):
    server, port = own_server(), free_port()
    speak_tls(server, port, certificate, clients="no")
    trusting = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate / 'cert.pem'}"
    with redrb.connect(trusting) as client, ExperienceStream(client, "math") as stream:
        stream.put(numbered(1))
        assert numbers(stream.take(1, timeout=0)) == [1]
        assert main(["doctor", "math", "--url", trusting, "--over", "0.01"]) == 0
    with redrb.connect(trusting) as client:  # weights are received past the parser
        weights = {"a": torch.randn(3_000_000), "b": torch.randn(7)}
        publisher = redrb.WeightPublisher(client, "policy")
        reader = redrb.WeightSubscriber(client, "policy")
        for in_place in (False, True):
            target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            for _ in range(2):
                weights["a"][1_500_000] += 1
                publisher.publish(weights)
                reader.poll(target, in_place=in_place)
                assert all(torch.equal(target[name], weights[name]) for name in weights)
    for _ in range(10):  # what the server sends unasked is no reply that was left
        with redrb.connect(trusting, retry_s=0) as client:
            assert client.execute("PING") == b"PONG"
    with pytest.raises(StoreUnavailable, match="certificate"):
        redrb.connect(f"rediss://127.0.0.1:{port}/0")
    with pytest.raises(StoreUnavailable, match="certificate"):  # it is for 127.0.0.1
        redrb.connect(trusting.replace("127.0.0.1", "localhost"))
    with pytest.raises(StoreUnavailable, match="write redis://"):
        redrb.connect(f"rediss://127.0.0.1:{server.port}/0", connect_timeout=0.5)
    with pytest.raises((StoreUnavailable, UnsupportedServer), match="rediss://"):
        redrb.connect(f"redis://127.0.0.1:{port}/0", connect_timeout=0.5)


@pytest.mark.parametrize("own_server", with_tls(), indirect=True)
def test_a_server_may_ask_for_a_client_certificate(own_server, certificate):
    server, port = own_server(), free_port()
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    speak_tls(server, port, certificate, clients="yes")
    trusting = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={cert}"
    with pytest.raises(StoreUnavailable):
        redrb.connect(trusting, retry_s=0)
    with redrb.connect(f"{trusting}&ssl_certfile={cert}&ssl_keyfile={key}") as client:
        ExperienceStream(client, "math").put(numbered(1))


@pytest.mark.parametrize("own_server", with_tls(), indirect=True)
@pytest.mark.parametrize("sentinel_tls", [True, False])
def test_tls_to_sentinels_and_tls_to_servers_are_chosen_apart(
    own_server, certificate, *, sentinel_tls
):
    server, port, own_port = own_server(), free_port(), free_port()
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    speak_tls(server, port, certificate, clients="no")
    settings = [
        f"sentinel monitor experience 127.0.0.1 {port} 1",
        *(f"tls-port {own_port}", f"tls-cert-file {cert}", f"tls-key-file {key}"),
        "tls-auth-clients no",
    ]
    sentinel = Server(server.program, sentinel="\n".join(settings))
    try:
        at = f"127.0.0.1:{own_port if sentinel_tls else sentinel.port}/experience/0"
        own = f"sentinel_ssl_ca_certs={cert}" if sentinel_tls else "sentinel_tls=false"
        url = f"rediss+sentinel://{at}?ssl_ca_certs={cert}&{own}"
        with redrb.connect(url) as client, ExperienceStream(client, "math") as stream:
            stream.put(numbered(1))
            options = ("-h", "127.0.0.1", "-p", str(port), "--tls", "--cacert", str(cert))
            assert cli_options(client) == options  # the primary, not the Sentinel
        with pytest.raises(StoreUnavailable, match="certificate"):
            redrb.connect(f"rediss+sentinel://{at}?{own}")
    finally:
        sentinel.close()
