"""Damaged data in Redis ends calls with errors of redrb: no other error, no endless script."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import redrb
from redrb import ExperienceStream
from redrb.browse import Browser, Choice, as_json
from redrb.connection import Client
from redrb.dashboard.groups import TaskGroups
from redrb.dashboard.payload import encoded, view_data
from redrb.dashboard.requests import GroupRequest
from redrb.doctor.checkup import check_up
from redrb.errors import RedrbError
from redrb.keys import TaskKeys
from redrb.registry import Registry
from redrb.state.findings import findings_of
from redrb.state.reader import StateReader
from redrb.state.view import View
from redrb.stream.task.inspection import task_stats
from redrb.stream.task.removal import task_contents
from redrb.stream.saving.saving import save_task
from redrb.stream.task.store import TaskStore
from redrb.weights.inspection.listing import published_in
from tests.samples import numbered

JUNK = (
    *(b"", b"x", b"\xff\xfe", b"-1", b"1.5", b"1e400", b"nan", b"[", b"{}", b"\x00", b" "),
    *(b"9" * 28, b"9" * 400, b"-" + b"9" * 28, b"9007199254740993", b"1 2 3", b"\xc1\xff"),
    *(b"0" * 16, b"\x81\xa4size\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\x91\xc0", b"\xc0"),
)


def filled(client: Client, namespace: str) -> None:
    """Make a task that has something in every key."""
    settings: dict[str, Any] = {
        "tags": ["level"], "keep": "1h", "max_staleness": 9, "order": "stalest", "max_bytes": 1 << 20,
    }  # fmt: skip
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
        client.execute(*(("HDEL", key, field) if rng.random() < 0.1 else ("HSET", key, field, junk)))
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
        return lambda: encoded(page.read(GroupRequest("math", order, status, (), 20)))

    def saved() -> None:
        save_task(TaskStore.of(client, namespace, "math"), path / "math")

    return {
        "stats": opened(lambda stream: stream.stats()),
        "counts": opened(lambda stream: stream.counts()),
        "staleness": opened(lambda stream: stream.staleness()),
        "settings": opened(lambda stream: stream.settings()),
        "history": opened(lambda stream: list(stream.history())),
        "read": opened(lambda stream: stream.read([1, 2, 3, 4, 5])),
        "letters": opened(lambda stream: stream.dead_letters()),
        "count": opened(lambda stream: stream.count(where={"level_gt": 1})),
        "requeue": lambda: browser.look(Choice(status="dead"), full=True),
        "newest": shown("newest"),
        "best": shown("best"),
        "stalest": shown("stalest"),
        "archived": shown("newest", "archived"),
        "leased": shown("newest", "leased"),
        "dead": shown("newest", "dead"),
        "by id": lambda: as_json(browser.look(Choice(ids=(1, 2, 3, 4, 9)), full=True)),
        "where": lambda: browser.look(Choice(where={"level": 3})),
        "page's letters": lambda: encoded(page.letters("math")),
        "task_stats": lambda: task_stats(client, "math", namespace=namespace, group="default"),
        "contents": lambda: task_contents(client, "math", namespace=namespace),
        "save": saved,
    }


def test_any_damage_ends_in_errors_of_redrb(real_url: str, namespace: str, tmp_path: Path) -> None:
    import os, collections
    with redrb.connect(real_url, retry_s=2) as client:
        filled(client, namespace)
        prefix = TaskKeys.of(namespace, "math").prefix
        keys = sorted(client.execute("KEYS", prefix.replace("{", "?").replace("}", "?") + "*"))
        whole = {key: client.execute("DUMP", key) for key in keys}
        print(keys)
        look = reads(client, namespace, tmp_path)
        reader = StateReader(client, namespace)
        bad = collections.Counter(); errs=collections.Counter()
        import traceback
        for seed in range(int(os.environ.get("SEEDS", "100"))):
            rng = random.Random(seed)
            for _ in range(rng.randint(1, 3)):
                damage(rng, client, rng.choice(keys))
            for name, read in look.items():
                try:
                    read()
                except RedrbError as error:
                    errs[name, str(error)[:150]] += 1
                except Exception as error:
                    tb = traceback.extract_tb(error.__traceback__)
                    bad[name, type(error).__name__, str(error)[:90], " < ".join(f"{f.filename.split('/')[-1]}:{f.lineno}" for f in tb[-4:])] += 1
            for key in client.execute("KEYS", prefix.replace("{", "?").replace("}", "?") + "*"):
                client.execute("DEL", key)
            for key, blob in whole.items():
                client.execute("RESTORE", key, 0, blob)
        for k, n in bad.most_common(): print("BAD", n, k)
        for k, n in errs.most_common(60): print(n, k)
