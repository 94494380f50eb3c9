"""Damaged data in Redis ends calls with errors of redrb: no other error, no endless script."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import redrb
from redrb import BatchTimeout, ExperienceStream
from redrb.connection import Client
from redrb.errors import RedrbError, StoreError
from redrb.keys import TaskKeys, WeightKeys, registry_key
from redrb.stream.saving.saving import save
from redrb.stream.task.lookup import task_stats
from redrb.stream.task.removal import task_contents
from redrb.stream.task.store import TaskStore
from redrb.watch.doctor.checkup import Checkup
from redrb.watch.groups import Browser, Choice, as_json
from redrb.watch.page.feed import encoded, view_data
from redrb.watch.page.groups import TaskGroups, group_choice
from redrb.watch.state.findings import findings_of
from redrb.watch.state.model import State
from redrb.watch.state.observer import Observer, View
from redrb.watch.state.reader import StateReader
from tests.samples import numbered

JUNK = (
    *(b"", b"x", b"\xff\xfe", b"-1", b"1.5", b"1e400", b"nan", b"[", b"{}", b"\x00", b" "),
    *(b"9" * 28, b"9" * 400, b"-" + b"9" * 28, b"9007199254740993", b"1 2 3", b"\xc1\xff"),
    *(b"0" * 16, b"\x81\xa4size\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\x91\xc0", b"\xc0"),
)


def filled(client: Client, namespace: str) -> None:
    """Make a task that has something in every key."""
    settings: dict[str, Any] = {"tags": ["level"], "max_bytes": 1 << 20}
    settings |= {"max_staleness": 9, "order": "stalest"}
    with ExperienceStream(client, "math", namespace=namespace, **settings) as stream:
        stream.advance(5)
        for number in range(1, 9):
            stream.put(numbered(number), policy_version=number % 5, tags={"level": number})
        stream.put_part("a", numbered(1), index=0, of=2, policy_version=1)
        stream.take(2, timeout=0).ack()
        stream.take(1, timeout=0).reject("nan loss")
        stream.take(1, timeout=0).release()
        stream.configure(limit=100)
        stream.advance(6)


def damage(rng: random.Random, client: Client, key: bytes) -> None:
    """Replace, add or delete something in a key."""
    junk, other = rng.choice(JUNK), rng.choice(JUNK)
    kind = client.execute("TYPE", key)
    if kind == b"hash":
        fields = client.execute("HKEYS", key)
        field = rng.choice([*fields, *fields, other])
        client.execute(*(("HSET", key, field, junk) if junk else ("HDEL", key, field)))
    elif kind == b"zset":
        score = rng.choice(["inf", "-inf", "-1", "1e300", "1.5", "9e15"])
        members = client.execute("ZRANGE", key, 0, -1)
        client.execute("ZADD", key, score, rng.choice([*members, junk]))
    elif kind == b"set":
        client.execute("SADD", key, junk)
    elif kind == b"stream":
        client.execute("XADD", key, "*", *rng.choice([(junk, other), ("g", junk), ("seq", junk)]))
    elif kind == b"list":
        client.execute("LPUSH", key, junk)


def reads(client: Client, namespace: str, path: Path) -> dict[str, Callable[[], object]]:
    """Return what people and commands read of a task."""
    page, browser = TaskGroups(client, namespace), Browser(client, "math", namespace=namespace)

    def opened(use: Callable[[ExperienceStream], object]) -> Callable[[], object]:
        def read() -> None:
            with ExperienceStream(client, "math", namespace=namespace, create=False) as stream:
                use(stream)

        return read

    def shown(order: str, status: str = "") -> Callable[[], object]:
        return lambda: encoded(
            page.read(
                *group_choice({"task": "math", "order": order, "status": status, "count": "20"})
            )
        )

    def saved() -> None:
        save(TaskStore.of(client, namespace, "math"), path / "math")

    def put(stream: ExperienceStream) -> None:
        stream.put(numbered(9), policy_version=5, timeout=0)

    def put_part(stream: ExperienceStream) -> None:
        stream.put_part("b", numbered(9), index=0, of=1, policy_version=5, timeout=0)

    def take(stream: ExperienceStream) -> None:
        with suppress(BatchTimeout):
            stream.take(2, timeout=0).batch()

    return {
        "put": opened(put),
        "put_part": opened(put_part),
        "take": opened(take),
        "configure": opened(lambda stream: stream.configure(limit=200)),
        "requeue letters": opened(lambda stream: stream.requeue([3, 4])),
        "stats": opened(lambda stream: stream.stats()),
        "counts": opened(lambda stream: stream.counts()),
        "staleness": opened(lambda stream: stream.staleness()),
        "settings": opened(lambda stream: stream.settings()),
        "read": opened(lambda stream: stream.read([1, 2, 3, 4, 5])),
        "letters": opened(lambda stream: stream.dead_letters()),
        "count": opened(lambda stream: stream.count(where={"level_gt": 1})),
        "requeue": lambda: browser.look(Choice(status="dead"), full=True),
        "newest": shown("newest"),
        "best": shown("best"),
        "stalest": shown("stalest"),
        "leased": shown("newest", "leased"),
        "dead": shown("newest", "dead"),
        "by id": lambda: as_json(browser.look(Choice(ids=(1, 2, 3, 4, 9)), full=True)),
        "where": lambda: browser.look(Choice(where={"level": 3})),
        "page's letters": lambda: encoded(page.letters("math")),
        "task_stats": lambda: task_stats(client, "math", namespace=namespace, group="default"),
        "contents": lambda: task_contents(client, "math", namespace=namespace),
        "save": saved,
    }


def restored(client: Client, whole: dict[bytes, bytes], pattern: str) -> None:
    """Put all keys back as they were."""
    for key in client.execute("KEYS", pattern):
        client.execute("DEL", key)
    for key, blob in whole.items():
        client.execute("RESTORE", key, 0, blob)


@pytest.mark.every_server
def test_any_damage_ends_in_errors_of_redrb(real_url: str, namespace: str, tmp_path: Path) -> None:
    """Each of these reads failed with errors of Python before, or never came back."""
    with redrb.connect(real_url, retry_s=5) as client:
        filled(client, namespace)
        pattern = TaskKeys.of(namespace, "math").prefix + "*"
        keys = sorted(client.execute("KEYS", pattern))
        whole = {key: client.execute("DUMP", key) for key in keys}
        looks = reads(client, namespace, tmp_path)
        failed = 0
        for seed in range(120):
            rng = random.Random(seed)
            for _ in range(rng.randint(1, 3)):
                damage(rng, client, rng.choice(keys))
            for name in rng.sample(sorted(looks), 3):
                try:
                    looks[name]()
                except RedrbError:
                    failed += 1
                except Exception as error:
                    error.add_note(f"seed {seed}, {name}")
                    raise
            state = StateReader(client, namespace).look()
            encoded(view_data(View(state, 1, 0.0, "", findings_of(state))))
            restored(client, whole, pattern)
        assert 20 < failed < 200


def test_one_bad_value_ends_no_look(client: Client, namespace: str) -> None:
    """Names that are no text, fields that are none, entries of weights: each is named alone."""
    key = registry_key(namespace)
    keys = {name: TaskKeys.of(namespace, name) for name in ("bad", "good", "hash")}
    for name in keys:
        ExperienceStream(client, name, namespace=namespace).close()
    for name in ("actor", "critic"):
        redrb.WeightPublisher(client, name, namespace=namespace).publish({"a": torch.ones(2)})
    at = client.at
    versions = WeightKeys.of(namespace, "actor").versions
    with Observer(client, namespace, every_s=0.02) as observer:
        before = observer.wait(0, 10)
        assert not before.findings
        at(key).execute("ZADD", key, 0, b"task:\xff", 0, b"weights:\xff")
        at(keys["bad"].puts).execute("HSET", keys["bad"].puts, "put", "\xff")
        at(keys["hash"].task).execute("HSET", keys["hash"].task, b"limit\xff", b"\xff")
        at(versions).execute("XADD", versions, "7-0", "kind", "none", "full", "1 0 9999999 " * 12)
        view = before
        while len(view.findings) < 4:
            assert not view.error
            view = observer.wait(view.number, 10)
        assert view.state is not None
        readable = {task.name: task.readable for task in view.state.tasks}
        assert readable == {"\\xff": False, "bad": False, "good": True, "hash": True}
        subjects = {finding.subject for finding in view.findings}
        assert subjects == {"task \\xff", "weights \\xff", "task bad", "weights actor"}
        weights = {each.name: each.readable for each in view.state.weights}
        assert weights == {"\\xff": False, "actor": False, "critic": True}
        report = Checkup(client, namespace, StateReader(client, namespace).look)
        assert subjects <= {finding.subject for finding in report.findings}
        for name in ("task", "weights"):
            at(key).execute("ZREM", key, name.encode() + b":\xff")
        at(keys["bad"].puts).execute("HSET", keys["bad"].puts, "put", "0")
        at(versions).execute("XDEL", versions, "7-0")
        while view.findings:
            view = observer.wait(view.number, 10)


def test_an_observer_survives_any_error(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, broken = StateReader.look, threading.Event()

    def failing(self: StateReader, *, timeout_s: float = 2.0) -> State:
        if broken.is_set():
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")
        return look(self, timeout_s=timeout_s)

    monkeypatch.setattr(StateReader, "look", failing)
    with Observer(client, namespace, every_s=0.02) as observer:
        broken.set()
        view = observer.wait(0, 10)
        while not view.error:
            view = observer.wait(view.number, 10)
        assert "UnicodeDecodeError" in view.error
        broken.clear()
        while view.error:
            view = observer.wait(view.number, 10, error=view.error)


@pytest.mark.every_server
@pytest.mark.parametrize("last", ["9" * 28, "9007199254740993", "x", "nan"])
def test_a_damaged_counter_hangs_no_script(
    client: Client, open_stream: Callable[..., ExperienceStream], namespace: str, last: str
) -> None:
    stream = open_stream()
    stream.put(numbered(1))
    puts = TaskKeys.of(namespace, "math").puts
    client.execute("HSET", puts, "last", last)
    with pytest.raises(StoreError, match=r"is damaged|user_script"):
        Browser(client, "math", namespace=namespace).look(Choice())
    client.execute("HSET", puts, "last", 1)
    assert len(Browser(client, "math", namespace=namespace).look(Choice()).groups) == 1


@pytest.mark.parametrize("kind", ["1.5", "7", "[]", "[1]", '{"a": 1}', "x"])
def test_a_damaged_kind_is_named(
    client: Client, open_stream: Callable[..., ExperienceStream], namespace: str, kind: str
) -> None:
    open_stream().put(numbered(1))
    task = TaskKeys.of(namespace, "math").task
    whole = client.execute("HGET", task, "kind")
    client.execute("HSET", task, "kind", kind)
    stream = open_stream()
    for put in (
        lambda: stream.put(numbered(2)),
        lambda: stream.put_part("a", numbered(2), index=0, of=1),
    ):
        with pytest.raises(StoreError, match="`kind` of a task cannot be read"):
            put()
    client.execute("HSET", task, "kind", whole)
