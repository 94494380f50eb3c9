"""The error tree is whole, every upstream exception has its place in it, and secrets stay out."""

from __future__ import annotations

import inspect
import traceback
from inspect import signature

import pytest
import redis
import redis.exceptions as upstream
from redis.connection import AbstractConnection

import redrb
from redrb import errors
from redrb.connection import Client
from redrb.connection.failures import (
    is_denied,
    is_missing_script,
    is_out_of_memory,
    is_transient,
    translate,
)
from redrb.connection.lending import Connections
from redrb.connection.url import COMMON, TCP, TLS, parse_address

SECRET = "hunter2!"

_ARGUMENTS: dict[str, tuple[str, ...]] = {"AskError": ("1 host:1",), "MovedError": ("1 host:1",)}


def upstream_errors() -> list[upstream.RedisError]:
    kinds = [kind for kind in vars(upstream).values() if inspect.isclass(kind)]
    return [
        kind(*_ARGUMENTS.get(kind.__name__, (f"{kind.__name__} happened",)))
        for kind in kinds
        if issubclass(kind, upstream.RedisError)
    ]


def own_errors() -> list[type[Exception]]:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind)]
    return [kind for kind in kinds if kind.__module__ == errors.__name__]


def test_every_error_is_a_redrb_error_and_public():
    assert redrb.errors is errors
    for kind in own_errors():
        assert issubclass(kind, errors.RedrbError)
        assert not kind.__name__.startswith("_")


def test_the_docstring_draws_the_tree_as_it_is():
    drawn = [line for line in errors.__doc__.splitlines() if "──" in line]
    assert len(drawn) == len(own_errors()) - 1
    for line in drawn:
        words = line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
        kind = getattr(errors, words[0])
        bases = [base for base in kind.__mro__[1:] if base.__module__ == "builtins"]
        if len(words) > 1 and words[1].startswith("("):
            assert words[1].strip("()") in {base.__name__ for base in bases}


@pytest.mark.parametrize("error", upstream_errors(), ids=lambda error: type(error).__name__)
def test_every_upstream_error_becomes_ours(error):
    ours = translate(error, "host:1/0")
    assert isinstance(ours, errors.StoreError)
    assert "host:1/0" in str(ours)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (upstream.AuthenticationError("WRONGPASS"), errors.StoreDenied),
        (upstream.NoPermissionError("no permissions to run"), errors.StoreDenied),
        (upstream.ConnectionError("refused"), errors.StoreUnavailable),
        (upstream.TimeoutError("no answer"), errors.StoreUnavailable),
        (upstream.BusyLoadingError("loading"), errors.StoreUnavailable),
        (upstream.ReadOnlyError("replica"), errors.StoreUnavailable),
        (upstream.OutOfMemoryError("OOM command not allowed"), errors.StoreFull),
        (upstream.ResponseError("MISCONF Errors writing to the AOF"), errors.StoreUnavailable),
        (upstream.InvalidResponse("Protocol Error"), errors.UnsupportedServer),
        (upstream.ResponseError("WRONGTYPE"), errors.StoreError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_upstream_errors_have_their_place(error, expected):
    assert type(translate(error, "host:1/0")) is expected


def test_a_broken_connection_leaves_it_uncertain_whether_a_request_landed():
    broken = translate(upstream.ConnectionError("reset"), "host:1/0")
    refused = translate(upstream.ReadOnlyError("replica"), "host:1/0")
    assert isinstance(broken, errors.StoreUnavailable)
    assert isinstance(refused, errors.StoreUnavailable)
    assert broken.uncertain
    assert not refused.uncertain
    assert broken.where == "host:1/0"


def test_memory_is_recognised_in_whatever_form_it_comes():
    message = "OOM command not allowed when used memory > 'maxmemory'."
    for error in (
        upstream.OutOfMemoryError(message),
        upstream.ExecAbortError(f"Transaction discarded because of: {message}"),
        upstream.ResponseError(f"Error running script: {message}"),
    ):
        assert is_out_of_memory(error)
        ours = translate(error, "here")
        assert isinstance(ours, errors.StoreFull)
        assert ours.reason == "memory"


def test_only_transient_errors_are_retried():
    assert is_transient(upstream.ConnectionError("reset"))
    assert is_transient(upstream.ResponseError("UNBLOCKED force unblock from blocking operation"))
    assert is_transient(upstream.ResponseError("ERR Error running script: -READONLY You can't"))
    discarded = "Transaction discarded because of: "
    assert is_transient(upstream.ResponseError("MISCONF Errors writing to the AOF file: No space"))
    for code in (
        "MISCONF Errors writing",
        "READONLY You can't write",
        "LOADING Redis is",
        "NOREPLICAS Not enough",
        "BUSY x",
    ):
        assert is_transient(upstream.ExecAbortError(discarded + code)), code
    denied = upstream.ExecAbortError(f"{discarded}NOPERM this user has no permissions")
    assert is_denied(denied)
    assert not is_transient(denied)
    assert not is_transient(
        upstream.ExecAbortError("Transaction discarded because of previous errors.")
    )
    assert not is_transient(upstream.AuthenticationError("WRONGPASS"))
    assert not is_transient(upstream.MaxConnectionsError("Too many connections"))
    assert not is_transient(upstream.ResponseError("WRONGTYPE"))
    assert not is_transient(ValueError("x"))
    assert is_missing_script(upstream.NoScriptError("NOSCRIPT"))


def test_a_replica_is_named_where_a_primary_was_asked_for():
    for error in (
        upstream.ReadOnlyError("You can't write against a read only replica."),
        upstream.ResponseError("ERR Error running script: -READONLY You can't write"),
    ):
        ours = translate(error, "host:1/0")
        assert isinstance(ours, errors.StoreUnavailable)
        assert "is a replica, which takes no writes" in str(ours)
        assert not ours.uncertain


def test_an_error_of_several_lines_shows_its_first_line():
    assert "second" not in str(translate(upstream.ResponseError("first\nsecond"), "here"))
    assert "TimeoutError" in str(translate(upstream.TimeoutError(), "here"))


@pytest.mark.parametrize(
    "url",
    [
        f"redis://maker:{SECRET}@host:7000/3",
        f"rediss://:{SECRET}@host",
        f"unix://maker:{SECRET}@/run/redis.sock?db=2",
        f"redis://host?password={SECRET}",
        f"redis+cluster://maker:{SECRET}@host:7000,other:7001",
        f"rediss+cluster://:{SECRET}@host,other/0?ssl_cert_reqs=none",
    ],
)
def test_passwords_are_used_and_never_shown(url):
    address = parse_address(url)
    assert address.options["password"] == SECRET
    client = Client(
        Connections(redis.ConnectionPool()),
        where=address.where,
        url=url,
        server_version=(7,),
    )
    for shown in (repr(address), str(address), address.where, repr(client), str(client)):
        assert SECRET not in shown


@pytest.mark.parametrize(
    "url",
    [
        f"redis://maker:{SECRET}@host:port/0",
        f"redis://maker:{SECRET}@host:99999/0",
        f"redis://maker:{SECRET}@host/0?socket_timeout=soon",
        f"redis://maker:{SECRET}@[::1/0",
        f"redis://maker:{SECRET}@host/first",
        f"redis+cluster://maker:{SECRET}@host/first",
        f"http://maker:{SECRET}@host",
        f"maker:{SECRET}@host",
        f"redis://maker:{SECRET}@host/0?connection_class=evil",
        f"unix://maker:{SECRET}@",
        f"redis+cluster://maker:{SECRET}@host:7000,other:port",
        f"redis+cluster://maker:{SECRET}@host:7000,other/1",
        f"redis+sentinel://maker:{SECRET}@host:7000,other",
        f"redis+sentinel://maker:{SECRET}@host:port/service",
        f"redis+sentinel://maker:{SECRET}@host/service/first",
        f"redis+sentinel://maker:{SECRET}@host/service?sentinel_tls=maybe",
        f"redis+sentinel://maker:{SECRET}@host,[:e//[/service",
        f"redis://maker:a?{SECRET}=b@host/0",
        f"redis+sentinel://maker:a?{SECRET}=b@host/main/0",
    ],
)
def test_a_url_that_is_wrong_is_an_error_without_its_password(url):
    with pytest.raises(errors.ConfigError) as caught:
        parse_address(url)
    text = "".join(traceback.format_exception(caught.value, chain=True))
    frames = [line for line in text.splitlines() if not line.startswith(("  ", "   "))]
    assert SECRET not in "\n".join(frames)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("rediss://host?ca=/ca.pem", ["no option 'ca'", "Is it ssl_ca_certs?", "ssl_keyfile"]),
        ("rediss://host?ssl_certs=x", ["Is it ssl_ca_certs?"]),
        ("redis://host?ca=/ca.pem", ["Is it ssl_ca_certs? This one needs TLS: rediss://"]),
        ("redis://host?ssl_ca_certs=x", ["option ssl_ca_certs", "write rediss://"]),
        ("redis+cluster://host,other?ssl_keyfile=x", ["write rediss+cluster://"]),
        ("redis://host?timeout=3", ["Is it socket_timeout?", "socket_connect_timeout"]),
        ("redis://host?zzz=3&db=1", ["no option 'zzz'. Its options are db"]),
        ("redis+sentinel://host/main?sentinel_ca=x", ["'sentinel_ca'", "sentinel_tls=true"]),
        ("rediss+sentinel://host/main?sentinel_ca=x", ["Is it sentinel_ssl_ca_certs?"]),
        ("rediss+sentinel://host/main?sentinel_tls=false&sentinel_ssl_keyfile=x", ["tls=true"]),
        ("redis+sentinel://host/main?ssl_keyfile=x", ["write rediss+sentinel://"]),
        ("redis://host?zzz", ["no option 'zzz'"]),
        ("redis://host?protocol=3", ["no option 'protocol'"]),
        ("unix:///run/redis.sock?ssl_ca_certs=x", ["no option 'ssl_ca_certs'"]),
        ("unix:///run/redis.sock?socket_keepalive=1", ["no option 'socket_keepalive'"]),
    ],
)
def test_an_unknown_option_of_a_url_is_named_with_the_nearest(url, words):
    with pytest.raises(errors.ConfigError) as caught:
        parse_address(url)
    for each in words:
        assert each in str(caught.value)


@pytest.mark.parametrize("option", COMMON + TCP + TLS)
def test_each_option_of_a_url_is_one_of_redis_py(option):
    if option == "max_connections":  # of the pool
        return
    kinds = (redis.SSLConnection, redis.Connection, AbstractConnection)
    assert any(option in signature(kind.__init__).parameters for kind in kinds)


@pytest.mark.parametrize(
    ("url", "where", "options"),
    [
        ("redis://host", "host:6379/0", {"host": "host", "port": 6379}),
        ("redis://", "localhost:6379/0", {"host": "localhost"}),
        ("redis://host:7000/3", "host:7000/3", {"db": 3, "port": 7000}),
        ("redis://u:p%40ss@host", "host:6379/0", {"username": "u", "password": "p@ss"}),
        ("rediss://host:1/0", "host:1/0", {"connection_class": redis.SSLConnection}),
        ("unix:///run/redis.sock", "unix:///run/redis.sock", {"path": "/run/redis.sock"}),
        ("redis://host?socket_timeout=3", "host:6379/0", {"socket_timeout": 3.0}),
        ("redis://[::1]:7000/0", "::1:7000/0", {"host": "::1", "port": 7000}),
    ],
)
def test_urls_are_understood(url, where, options):
    address = parse_address(url)
    assert address.where == where
    assert options.items() <= address.options.items()


@pytest.mark.parametrize(
    ("url", "path"),
    [("embedded://", ""), ("embedded:///data/run 1", "/data/run 1"), ("fake://x", "x")],
)
def test_urls_of_embedded_and_fake_servers_have_a_path(url, path):
    address = parse_address(url)
    assert (address.path, address.where, address.options) == (path, url, {})


def test_a_url_of_a_cluster_names_nodes_that_share_all_else():
    address = parse_address(f"rediss+cluster://maker:{SECRET}@a:7000,b,[::1]:7002?socket_timeout=9")
    assert address.nodes == (("a", 7000), ("b", 6379), ("::1", 7002))
    assert address.where == "a:7000,b:6379,::1:7002"
    node = address.node(("c", 7009))
    assert (node.scheme, node.where) == ("rediss", "c:7009")
    assert node.options["username"] == "maker"
    assert node.options["password"] == SECRET
    assert node.options["socket_timeout"] == 9.0
    assert (node.options["host"], node.options["port"]) == ("c", 7009)


def test_a_url_of_sentinels_keeps_their_login_apart_from_that_of_the_servers():
    address = parse_address(
        f"rediss+sentinel://maker:{SECRET}@a,b:7001/my%20service/3?ssl_ca_certs=ca.pem"
        "&socket_timeout=9&sentinel_username=watcher&sentinel_password=p%40ss%2F"
    )
    assert address.service == "my service"
    assert address.where == "my%20service/3 of the Sentinels a:26379,b:7001"
    assert address.options["username"] == "maker"
    assert address.options["password"] == SECRET
    assert address.options["db"] == 3
    assert address.options["ssl_ca_certs"] == "ca.pem"
    assert "host" not in address.options
    first, second = address.sentinels
    assert (first.scheme, first.where, second.where) == ("rediss", "a:26379", "b:7001")
    assert first.options["username"] == "watcher"
    assert first.options["password"] == "p@ss/"
    assert "db" not in first.options
    assert SECRET not in repr(address)


def test_sentinels_have_no_login_and_use_tls_as_the_servers_do():
    for scheme, option, tls in [
        ("redis", "", False),
        ("rediss", "", True),
        ("redis", "?sentinel_tls=true", True),
        ("rediss", "?sentinel_tls=false", False),
    ]:
        address = parse_address(f"{scheme}+sentinel://:{SECRET}@a/service{option}")
        (sentinel,) = address.sentinels
        assert ("connection_class" in sentinel.options) is tls
        assert ("connection_class" in address.options) is (scheme == "rediss")
        assert "password" not in sentinel.options
        assert "db" not in address.options
