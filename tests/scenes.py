"""`Scene`: a task in a certain state, whose scripts run one by one while their work is counted."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

import redrb
from redrb import ExperienceStream, make_experience_batch
from redrb.connection import Client
from redrb.experience import Experience, Status
from redrb.lua.calls import Call
from redrb.lua.scripts import Script, assemble, load
from redrb.stream.take.calls import Beat, Take, TakeRequest
from tests.audit import audit
from tests.samples import numbered

R = TypeVar("R")

FOREVER_MS = 600_000
"""Longer than any test."""

_SET = """
--@include task settings
redis.call('HSET', task, ARGV[1], ARGV[2])
pack_rules()
"""


def run_script(
    client: Client, script: Script, keys: Sequence[Any], arguments: Sequence[Any]
) -> Any:
    """Run a script that is no `Call`."""
    return client.execute("EVAL", script.text, len(keys), *keys, *arguments)


@dataclass
class Scene:
    """One task in a certain state, and the commands that each script has called in it."""

    client: Client
    namespace: str
    size: int
    settings: dict[str, Any]
    costs: dict[str, int] = field(default_factory=dict)
    tokens: Iterator[int] = field(default_factory=lambda: iter(range(1, 1_000_000)))

    def __post_init__(self) -> None:
        self.stream = self.open()
        self.stream.join_group()

    @property
    def incarnation(self) -> str:
        """Incarnation of the task."""
        return self.stream._task.description.incarnation

    def open(self, **changes: Any) -> ExperienceStream:
        """Open the task of this scene; with the fixture `no_heartbeats` none comes in the test."""
        options = {"lease_ms": FOREVER_MS, **self.settings, **changes}
        return ExperienceStream(self.client, "math", namespace=self.namespace, **options)

    def fill(self, count: int | None = None, **options: Any) -> tuple[int, ...]:
        """Put groups; the size of the scene if `count` is None."""
        return self.stream.put(groups_of(self.size if count is None else count), **options)

    def run(self, call: Call[R], *beside: bytes) -> R:
        """Run the script of a call once, and return its reply."""
        return self.stream._task.store.call(call, *beside)

    def set(self, name: str, value: int) -> None:
        """Change a setting that cannot be changed otherwise."""
        keys: list[Any] = [self.stream._task.store.keys.stream]
        run_script(self.client, assemble("test", _SET), keys, [name, value])

    def cost(self, call: Call[R], *beside: bytes, name: str = "") -> R:
        """Run the script of a call once and note how many commands that took."""
        replies: list[R] = []
        self.note(name or call.script, lambda: replies.append(self.run(call, *beside)))
        return replies[0]

    def note(self, name: str, call: Callable[[], object]) -> None:
        """Note how many commands the server ran during a call."""
        before = commands_run(self.client)
        call()
        cost = commands_run(self.client) - before
        self.costs[name] = max(cost, self.costs.get(name, 0))

    def note_each(self, call: Callable[[], object]) -> None:
        """Note of each script that a call runs the most commands of one request.

        Requests of other threads, such as heartbeats, are not noted.
        """
        client, names, caller = self.client, script_names(), threading.get_ident()
        names |= {load(name).text: name for name in names.values()}
        once, exchange = client.once, client.exchange

        def counted(request: Callable[[], Any], words: Iterable[Any]) -> Any:
            if threading.get_ident() != caller:
                return request()
            before = commands_run(counter)
            reply = request()
            cost = commands_run(counter) - before
            for name in {names[word] for word in words if word in names}:
                self.costs[name] = max(cost, self.costs.get(name, 0))
            return reply

        with redrb.connect(client.url) as counter, pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "once", lambda *words: counted(lambda: once(*words), words))
            patch.setattr(
                client, "exchange", lambda sent: counted(lambda: exchange(sent), sent.scripts)
            )
            call()

    def take(self, consumer: str, count: int, *, ttl_ms: int = 0, **options: Any) -> Any:
        """Take as a consumer of this name: returns the reply of the script."""
        return self.run(self.taking(consumer, count, ttl_ms=ttl_ms, **options))

    def taking(
        self,
        consumer: str,
        count: int,
        *,
        ttl_ms: int = 0,
        lease_ms: int = FOREVER_MS,
        status: str = "completed",
        where: str = "",
        group: str = "default",
    ) -> Take:
        """Return the call of a take; each has a slot of its own name."""
        token = next(self.tokens)
        return Take(
            group,
            consumer,
            f"{consumer}/{token % 8}",
            str(token),
            TakeRequest(count, count, Status(status), where),
            f"{consumer}.w",
            ttl_ms,
            lease_ms,
            self.incarnation,
            ttl_ms == 0,
        )

    def beat(self, consumer: str) -> Beat:
        """Return the call of a heartbeat; the announcement goes beside it."""
        return Beat("default", consumer, FOREVER_MS, self.incarnation)

    def close(self) -> None:
        """Check the task, and delete it."""
        audit(self.stream)
        assert self.stream.stats().ledger.balanced
        self.note("task/clear", self.stream.clear)
        self.stream.close()


def script_names() -> dict[str, str]:
    """Return the names of all scripts by their SHA-1."""
    folder = Path(redrb.__file__).parent / "lua"
    names = [str(path.relative_to(folder).with_suffix("")) for path in folder.glob("*/*.lua")]
    return {load(name).sha: name for name in names if not name.startswith("include/")}


def groups_of(count: int) -> Experience:
    """Return so many tiny groups of one sample."""
    return make_experience_batch([numbered(number % 1000) for number in range(count)])


def commands_run(client: Client) -> int:
    """Return how many commands the server has run, those of scripts included."""
    statistics = client.execute("INFO", "commandstats").decode()
    lines = [line for line in statistics.splitlines() if line.startswith("cmdstat_")]
    return sum(int(line.split("calls=")[1].split(",")[0]) for line in lines)


def holds_in_a_child(check: Callable[[], object]) -> bool:
    """Return whether `check` is true in a forked process, and raises nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork do not mix well
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = int(not check())
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait for an effect of another thread, connection or process."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def pass_epochs(stream: ExperienceStream, count: int) -> None:
    """Let so many epochs of a task pass, and its old records of producers be removed."""
    store = stream._task.store
    for _ in range(count):
        store.client.execute("HSET", store.keys.task, "epoch_ms", 1)
        stream._task.reopen()
        while store.client.execute("HEXISTS", store.keys.task, "epoch_at"):
            stream._task.reopen()


def forget_the_silent(stream: ExperienceStream) -> None:
    """Let ten minutes pass for announcements of others, and the heartbeat remove them."""
    store = stream._task.store
    workers = f"{store.keys.prefix}workers"
    calls = 0
    stream._consumer.beat()
    while calls < 100 and store.client.execute("ZCARD", workers) > 1:
        for worker in store.client.execute("ZRANGE", workers, 0, -1):
            if worker.decode() != stream.worker.name:
                store.client.execute("ZADD", workers, 1, worker)
        stream._consumer.beat()
        calls += 1


def silence(stream: ExperienceStream) -> None:
    """End the heartbeats of a stream, also one that is under way."""
    beating = [stream.worker._heartbeat, stream._consumer._heartbeat]
    for heartbeat in [one for one in beating if one is not None]:
        heartbeat.stop()
        heartbeat._thread.join(10)
        assert not heartbeat._thread.is_alive()
