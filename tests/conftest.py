"""Fixtures: the backends that tests run on, and a fresh namespace for each test."""

from __future__ import annotations

import gc
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias
from zlib import crc32

import hypothesis
import pytest
import torch

import redrb
from redrb.connection import Client, deadline, fake
from redrb.lua import scripts
from redrb.lua.pages import PAGES
from redrb.lua.scripts import load
from redrb.stream import heartbeat
from redrb.stream.put import room
from redrb.stream.take import taker
from tests.accepting import close_what_comes_late
from tests.audit import audit
from tests.clusters import RedisCluster
from tests.repeating import note_programs
from tests.servers import Server, named_programs, programs
from tests.skipped import pytest_terminal_summary  # noqa: F401 (a hook of pytest)
from tests.tools import need

torch.set_num_threads(1)
# the same examples everywhere, and as much time as a busy machine needs
hypothesis.settings.register_profile(
    "redrb",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("redrb")
close_what_comes_late()
gc.disable()  # until all is imported and collected

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `make test &`; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

REAL = programs()

_read_once = cache(scripts._read)
_lines_once = cache(scripts._lines)
_assemble = scripts.assemble
_assembled: dict[tuple[str, str, tuple[int, ...]], scripts.Script] = {}

Opener: TypeAlias = Callable[..., redrb.ExperienceStream]
"""Opens the same task with other arguments of `ExperienceStream`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run each test on as many servers as its subject needs; on the others it is a slow test.

    A contract test runs on fakeredis or on one of the two usual servers, each on about a third of
    them, as the same requests are sent to all. Those that are marked `every_server` ask how a
    server behaves, and run on all three. Tests of whole processes, of clusters, and those that are
    marked `long` take seconds, and run on the last server only: thousands of requests cost
    fakeredis, which is Python, several times as much as a server. Servers that REDRB_TEST_SERVERS
    names run all contract tests.
    """
    for item in items:
        note_programs(getattr(item, "obj", None))
    usual = ["fake", *(name for name in REAL if name not in named_programs())]
    backends: dict[str, list[str]] = {}
    split = [(item, *_split(item, usual)) for item in items]
    for _, test, own in split:
        backends.setdefault(test, []).extend(own)
    for item, test, own in split:
        folder, found = item.path.parent.name, backends[test] or [""]
        if item.get_closest_marker("long"):
            wanted = found[-1:]
        elif folder in ("integration", "faults") or "cluster" in item.path.name:
            wanted = ["fake", found[-1]]
        elif folder == "contract" and item.get_closest_marker("every_server") is None:
            wanted = [found[crc32(test.encode()) % len(found)]]
        else:
            continue
        if set(own) - set(wanted):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what tests make only, not at modules and collected tests.

    Else it takes a twelfth of the processor time of all unit tests.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def _split(item: pytest.Item, usual: list[str]) -> tuple[str, list[str]]:
    """Return the name of a test without its usual servers, and these."""
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    own = [each for each in given if isinstance(each, str) and each in usual]
    test, _, parameters = item.nodeid.partition("[")
    for name in own:
        parameters = parameters.replace(name, "", 1)
    return f"{test}[{parameters}", own


@pytest.fixture(scope="session")
def server_urls() -> Iterator[Callable[[str], str]]:
    """URL of the real server NAME, started at its first use and shared by the session."""
    running: dict[str, Server] = {}

    def url(name: str) -> str:
        if name not in running:
            running[name] = Server(REAL[name])
        return running[name].url

    yield url
    for server in running.values():
        server.close()


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[str], RedisCluster]]:
    """A cluster of the real server NAME, shared by the session: tests leave it whole."""
    running: dict[str, RedisCluster] = {}

    def cluster(name: str) -> RedisCluster:
        if name not in running:
            running[name] = RedisCluster(REAL[name])
        return running[name]

    yield cluster
    for each in running.values():
        each.close()


@pytest.fixture(params=["fake", *REAL])
def url(request: pytest.FixtureRequest, server_urls: Callable[[str], str]) -> Iterator[str]:
    """URL of each backend in turn: fakeredis, then every real server at hand."""
    if request.param != "fake":
        yield server_urls(request.param)
        return
    name = uuid.uuid4().hex
    yield f"fake://{name}"
    fake._servers.pop(name, None)  # its scripts take megabytes


@pytest.fixture(params=list(REAL))
def real_url(request: pytest.FixtureRequest, server_urls: Callable[[str], str]) -> str:
    """URL of each real server in turn."""
    return server_urls(request.param)


@pytest.fixture(params=list(REAL))
def own_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """Start real servers that this test may kill, with further arguments."""
    started: list[Server] = []

    def start(*arguments: str) -> Server:
        program = REAL.get(request.param) or need(request.param)
        started.append(Server(program, *arguments))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    """A client of each backend in turn."""
    with redrb.connect(url, retry_s=10) as client:
        yield client


@pytest.fixture
def owner(real_url: str) -> Iterator[Client]:
    """A client of each real server in turn, with all rights."""
    with redrb.connect(real_url, retry_s=10) as client:
        yield client


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make pages of the scripts small in this process: `pages(taken_over=3)`."""
    with small_pages(monkeypatch) as make:
        yield make


@cache
def _pages_of(name: str, source: str) -> tuple[str, ...]:
    """Return the pages whose sizes are in the text of a script."""
    named = {each for _, code in _lines_once(name, source) for each in scripts._NAMED.findall(code)}
    return tuple(sorted(page for kind, page in named if kind == "PAGE"))


def _assemble_once(name: str, source: str) -> scripts.Script:
    """Return what `scripts.assemble` does, which is made once for each size of a script's pages."""
    key = name, source, tuple(PAGES[page] for page in _pages_of(name, source))
    if key not in _assembled:
        _assembled[key] = _assemble(name, source)
    return _assembled[key]


# Tests with small pages make `load` forget all scripts; the next tests would parse them anew.
scripts._read, scripts._lines, scripts.assemble = _read_once, _lines_once, _assemble_once


@contextmanager
def small_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make pages of the scripts small in this block."""
    before = dict(PAGES)

    def make(**small: int) -> None:
        assert set(small) <= set(PAGES), f"unknown pages: {set(small) - set(PAGES)}"
        PAGES.update(small)
        load.cache_clear()
        # a call that need not wait may take this long for its pages, which are many more now
        monkeypatch.setattr(deadline, "PAGES_S", 10.0)

    try:
        yield make
    finally:
        PAGES.update(before)
        load.cache_clear()


LOOK_AGAIN_S = 15.0
"""Longest block of a waiter under `only_wakes`: more than a test allows for one that is woken."""


@pytest.fixture
def no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no heartbeat of streams with long leases come within a test, however slow the machine."""
    monkeypatch.setattr(heartbeat, "LONGEST_PERIOD_S", 3600.0)


@pytest.fixture
def only_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waits of this process end by wake-ups; without one, a waiter looks after LOOK_AGAIN_S."""
    monkeypatch.setattr(deadline, "SLICE_S", LOOK_AGAIN_S)
    for module in (taker, room):
        monkeypatch.setattr(module, "QUEUE_TTL_MS", 60_000)


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return uuid.uuid4().hex


@pytest.fixture
def open_stream(client: Client, namespace: str) -> Iterator[Opener]:
    """Open the same task several times; every stream is audited at the end."""
    opened: list[redrb.ExperienceStream] = []

    def open_it(**settings: Any) -> redrb.ExperienceStream:
        opened.append(redrb.ExperienceStream(client, "math", namespace=namespace, **settings))
        return opened[-1]

    yield open_it
    for stream in opened:
        audit(stream)
        assert stream.stats().ledger.balanced
        stream.close()
