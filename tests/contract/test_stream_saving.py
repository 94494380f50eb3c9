"""Save and resume: the groups of a file are put anew, in their order, each once."""

from __future__ import annotations

import random
import struct
import threading
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgpack
import pytest
import xxhash

from redrb import BatchTimeout, ConfigError, ExperienceStream, StoreFull, TaskMismatch
from redrb.connection import Client
from redrb.connection.transport import Pipeline
from redrb.errors import DecodeError, RedrbError, StoreError
from redrb.experience import Status
from redrb.keys import TaskKeys
from redrb.stream.saving import resuming
from redrb.stream.saving.file import FRAME, MAGIC, PREFIX, VERSION, Kind
from redrb.stream.saving.snapshot import PAGE_BYTES, PAGE_GROUPS, TaskReader
from redrb.stream.task.entries import unpack_facts
from tests.audit import audit
from tests.samples import numbered, numbers

TASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bounded": {"limit": 100, "max_bytes": 1 << 20, "max_deliveries": 2},
    "indexed": {"order": "fifo", "max_staleness": 50, "on_expired": "keep"},
    "lifo": {"order": "lifo"},
    "stalest": {"order": "stalest", "max_staleness": 50, "max_token_staleness": 60},
    "freshest": {"order": "freshest", "max_reads": 3},
    "priority": {"order": "priority", "tags": ["name", "score"]},
    "uniform": {"order": "uniform", "max_reads": 0},
    "prioritized": {"order": "prioritized", "max_staleness": 50},
    "tagged": {"tags": ["name"], "max_bytes": 1 << 20},
}
DRAWN = ("uniform", "prioritized")


def open_task(client: Client, namespace: str, kind: str, task: str = "from", **more: Any) -> Any:
    return ExperienceStream(client, task, namespace=namespace, **{**TASKS[kind], **more})


def fill(stream: ExperienceStream, kind: str, groups: int = 12) -> None:
    """Put groups with all that this kind of task can tell apart."""
    indexed = kind not in ("plain", "bounded")
    for number in range(groups):
        options: dict[str, Any] = {}
        if indexed:
            options["priority"] = float(number * 7 % 5 + 1)
            options["status"] = Status.ABORTED if number % 4 == 3 else None
        if "tags" in TASKS[kind]:
            values = {"name": f"name {number % 3}", "score": number / 2}
            options["tags"] = {name: values[name] for name in TASKS[kind]["tags"] if number != 5}
        stream.put([numbered(number)] * (1 + number % 2), policy_version=number * 5 % 7, **options)


def use(stream: ExperienceStream, other: ExperienceStream) -> None:
    """Leave traces of everything that may happen to groups."""
    with suppress(RuntimeError), stream.take(2, timeout=0):
        raise RuntimeError("a failed delivery")
    stream.take(2, timeout=0).ack()
    other.take(1, timeout=0).reject("no good")
    other.take(2, timeout=0).ack()
    stream.take(1, timeout=0).release()


def held(stream: ExperienceStream) -> dict[str, list[int]]:
    """Return the numbers of the groups that each consumer group needs still, after an audit.

    They are in the order of arrival: ids are others after a resume.
    """
    found = {}
    for name, holdings in audit(stream).items():
        ids = sorted(holdings.waiting | holdings.leased.keys())
        found[name] = [int(group.items[0].reward) for group in filter(None, stream.read(ids))]
    return found


def known(stream: ExperienceStream) -> dict[str, list[Any]]:
    """Return what the task knows of each group, in the order of arrival."""
    prefix, run = stream._task.store.keys.prefix, stream._task.store.client.execute
    flat = run("HGETALL", f"{prefix}facts")
    facts = {
        member: unpack_facts(packed) for member, packed in zip(flat[::2], flat[1::2], strict=True)
    }
    for each in facts.values():
        each.pop("current", None)
    members = sorted(facts)
    found: dict[str, list[Any]] = {"facts": [facts[member] for member in members]}
    for kind in ("moved", "expiries", "deliveries", "reads"):
        for group in sorted(name.decode() for name in run("SMEMBERS", f"{prefix}groups")):
            name = f"{kind}:{group}"
            found[name] = members and run("HMGET", prefix + name, *members)
    return found


def order_of(stream: ExperienceStream) -> dict[Status, list[int]]:
    """Take everything in every status, and give it back; returns the numbers of the groups."""
    found = {}
    for status in Status:
        count = stream.count(status)
        if count:
            lease = stream.take(count, timeout=0, status=status)
            found[status] = [int(group[0].reward) for group in lease.groups()]
            lease.release()
    return found


def everything(client: Client, namespace: str) -> dict[bytes, bytes]:
    """Return all that a server holds of a namespace."""
    keys = client.execute("KEYS", f"redrb:{{{namespace}:*")
    return {key: client.execute("DUMP", key) for key in sorted(keys)}


@pytest.mark.parametrize("kind", TASKS)
def test_a_resumed_task_holds_what_was_saved(
    client: Client, namespace: str, kind: str, tmp_path: Path
) -> None:
    stream = open_task(client, namespace, kind)
    other = ExperienceStream(client, "from", namespace=namespace, group="other")
    for one in (stream, other):
        one.join_group()
    fill(stream, kind)
    if kind in ("stalest", "indexed"):
        assert stream.expire(54, on_expired="keep") > 0
        stream.advance(10)
    use(stream, other)
    if kind not in ("plain", "bounded"):
        waiting = audit(stream)["default"].waiting
        stream.move([max(waiting)], Status.FAILED)
    leased = stream.take(2, timeout=0)
    before, was = held(stream), stream.stats()
    saved = stream.save(tmp_path / "task")
    assert (saved.groups, saved.dead_letters) == (was.stored, 1)
    assert saved.nbytes == saved.path.stat().st_size
    assert held(stream) == before
    leased.release()

    back = open_task(client, namespace, kind, "to")
    assert back.resume(tmp_path / "task") == saved
    assert held(back) == before
    assert known(back) == known(stream)
    assert back.counts() == stream.counts()
    drawn = TASKS[kind].get("order") in DRAWN
    assert drawn or order_of(back) == order_of(stream)
    now = back.stats()
    for name in ("stored", "limit", "max_bytes", "version"):
        assert getattr(now, name) == getattr(was, name), name
    # counters begin anew: groups and dead letters count as put
    for group, dead in (("default", 0), ("other", 1)):
        own = ExperienceStream(client, "to", namespace=namespace, group=group).stats().ledger
        waiting = len(before[group])
        assert own.as_dict() == {
            **dict.fromkeys(own.as_dict(), 0),
            "put": waiting + dead,
            "waiting": waiting,
            "dead": dead,
        }
    assert [letter.reason for letter in back.dead_letters()] == ["no good"]
    assert back.dead_letters()[0].time == stream.dead_letters()[0].time
    audit(back)

    (last,) = stream.put(numbered(99, policy_version=99))
    (new,) = back.put(numbered(99, policy_version=99))
    assert new > last, "an id of the saved task names another group"
    letter = other.dead_letters()[0].id
    requeued = ExperienceStream(client, "to", namespace=namespace, group="other").requeue([letter])
    assert requeued.keys() == {letter}
    audit(back)
    back.take(1, timeout=0).ack()
    audit(back)


@pytest.mark.parametrize("groups", [1, PAGE_GROUPS - 1, PAGE_GROUPS, PAGE_GROUPS + 1, 3200])
def test_any_number_of_groups_and_dead_letters_keeps_its_order(
    client: Client, namespace: str, groups: int, tmp_path: Path
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace, order="lifo", max_dead=0)
    letters = min(groups, 3 * PAGE_GROUPS)
    stream.put_many([[numbered(-number)] for number in range(letters)])
    stream.take(letters, timeout=0).reject("no good")
    stream.put_many([[numbered(number)] for number in range(groups)])
    saved = stream.save(tmp_path / "task")
    assert (saved.groups, saved.dead_letters) == (groups, letters)
    back = ExperienceStream(client, "to", namespace=namespace)
    assert back.resume(tmp_path / "task") == saved
    assert numbers(back.take(groups, timeout=0)) == [*reversed(range(groups))]
    assert [letter.id for letter in back.dead_letters(groups)] == [
        letter.id for letter in stream.dead_letters(groups)
    ]
    records = client.execute("HLEN", f"{back._task.store.keys.prefix}sources:saved")
    assert records <= 8 * PAGE_GROUPS, "the records of a file grow with it"
    audit(back)


@pytest.mark.parametrize("kind", ["bounded", "stalest", "prioritized", "tagged"])
def test_settings_are_those_of_the_file(
    client: Client, namespace: str, kind: str, tmp_path: Path
) -> None:
    stream = open_task(client, namespace, kind)
    fill(stream, kind, 4)
    stream.save(tmp_path / "task")
    back = ExperienceStream(client, "to", namespace=namespace)
    back.resume(tmp_path / "task")
    back.put(numbered(9), policy_version=3)
    audit(back)
    open_task(client, namespace, kind, "to")
    if TASKS[kind].get("order", "fifo") == "fifo":
        assert numbers(back.take(3, timeout=0)) == numbers(stream.take(3, timeout=0))


def test_a_task_resumes_with_further_settings(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace)
    fill(stream, "plain", 5)
    stream.take(2, timeout=0)
    stream.save(tmp_path / "task")
    back = ExperienceStream(client, "to", namespace=namespace, max_reads=2)
    back.resume(tmp_path / "task")
    audit(back)
    third = sorted(audit(back)["default"].waiting)[2]
    back.move([third], Status.FAILED)
    back.put(numbered(9), policy_version=3)
    lease = back.take(5, timeout=0)
    assert numbers(lease)[0] == 0
    lease.ack()
    assert back.stats().reads == 5
    audit(back)


def test_limits_of_the_task_come_before_those_of_the_file(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace, limit=4, max_deliveries=3)
    fill(stream, "plain", 4)
    stream.save(tmp_path / "task")
    back = ExperienceStream(client, "to", namespace=namespace, limit=5)
    back.resume(tmp_path / "task")
    assert back.stats().limit == 5
    ExperienceStream(client, "to", namespace=namespace, max_deliveries=3)
    back.put(numbered(4), timeout=0)


@pytest.mark.long
def test_tags_keep_their_strings(client: Client, namespace: str, tmp_path: Path) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace, tags=["name", "score"])
    for number in range(700):  # more than one part
        stream.put(numbered(number), tags={"name": f"n{number}", "score": number})
    stream.save(tmp_path / "task")
    back = ExperienceStream(client, "to", namespace=namespace)
    back.resume(tmp_path / "task")
    back.put(numbered(-1), tags={"name": "new", "score": 1})
    back.put(numbered(-2), tags={"name": "n5", "score": 1})
    assert numbers(back.take(1, timeout=10, where={"name": "new"})) == [-1]
    assert numbers(back.take(2, timeout=10, where={"name": "n5"})) == [5, -2]
    assert numbers(back.take(1, timeout=10, where={"name": "n699"})) == [699]
    assert back.count(where={"score_lt": 100}) == 99
    audit(back)


def test_a_bound_of_waiting_groups_is_kept_after_a_resume(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace, max_waiting=4)
    for number in range(4):
        stream.put(numbered(number), timeout=0)
    stream.take(1, timeout=0).ack()
    stream.take(1, timeout=0)
    stream.save(tmp_path / "task")
    back = ExperienceStream(client, "to", namespace=namespace)
    back.resume(tmp_path / "task")
    back.put(numbered(4), timeout=0)
    with pytest.raises(StoreFull) as caught:
        back.put(numbered(5), timeout=0)
    assert caught.value.reason == "max_waiting"
    assert numbers(back.take(4, timeout=0)) == [1, 2, 3, 4]


def test_a_consumer_group_that_joined_before_the_resume_finds_all_groups(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    for kind in ("plain", "tagged"):
        stream = open_task(client, namespace, kind, f"from-{kind}")
        fill(stream, kind, 6)
        stream.take(2, timeout=0).ack()
        path = tmp_path / kind
        saved = stream.save(path)
        back = open_task(client, namespace, kind, f"to-{kind}")
        late = ExperienceStream(client, f"to-{kind}", namespace=namespace, group="late")
        late.join_group()
        back.resume(path)
        holdings = held(back)
        assert len(holdings["late"]) == saved.groups
        assert holdings["default"] == held(stream)["default"]
        assert late.stats().ledger.put == saved.groups


def test_a_resume_wakes_waiting_consumers(client: Client, namespace: str, tmp_path: Path) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace)
    fill(stream, "plain", 3)
    stream.save(tmp_path / "task")
    back = ExperienceStream(client, "to", namespace=namespace)
    found: list[int] = []
    taker = threading.Thread(target=lambda: found.extend(back.take(3, timeout=60).ids))
    taker.start()
    while not back.stats().consumers_waiting:
        pass
    ExperienceStream(client, "to", namespace=namespace).resume(tmp_path / "task")
    taker.join(timeout=30)
    assert len(found) == 3
    audit(back)
    back.close()


def test_no_consumer_group_and_no_group_at_all(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    empty = ExperienceStream(client, "empty", namespace=namespace, order="stalest")
    assert empty.save(tmp_path / "empty").groups == 0
    back = ExperienceStream(client, "back", namespace=namespace)
    back.resume(tmp_path / "empty")
    assert back.put(numbered(1), policy_version=1) == (1,)
    audit(back)
    stream = ExperienceStream(client, "from", namespace=namespace)
    fill(stream, "plain", 3)
    stream.save(tmp_path / "task")
    back = ExperienceStream(client, "to", namespace=namespace)
    back.resume(tmp_path / "task")
    assert len(back) == 3
    assert len(back.take(3, timeout=0).ids) == 3
    audit(back)


@pytest.mark.usefixtures("no_heartbeats")
def test_a_task_that_is_not_new_is_left_alone(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace)
    fill(stream, "plain", 3)
    stream.save(tmp_path / "task")
    before = everything(client, namespace)
    with pytest.raises(ConfigError, match="not new"):
        stream.resume(tmp_path / "task")
    assert everything(client, namespace) == before
    stream.take(3, timeout=0).reject("no good")
    with pytest.raises(ConfigError, match="clear"):  # it holds dead letters
        stream.resume(tmp_path / "task")
    stream.clear()
    assert stream.resume(tmp_path / "task").groups == 3
    assert len(stream) == 3


def test_a_task_that_was_emptied_is_filled(client: Client, namespace: str, tmp_path: Path) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace)
    for number in range(3):  # one file after another
        stream.put_many([[numbered(each)] for each in range(3 + number)])
        stream.save(tmp_path / f"{number}")
        stream.take(3 + number, timeout=0).ack()
        stream.resume(tmp_path / f"{number}")
        stream.resume(tmp_path / f"{number}")  # as if the reply to the first one was lost
        lease = stream.take(3 + number, timeout=0)
        assert numbers(lease) == [*range(3 + number)]
        lease.ack()
        with pytest.raises(ConfigError, match="resumed from this save before, and used since"):
            stream.resume(tmp_path / f"{number}")
        assert len(stream) == 0


@pytest.mark.parametrize("other", [{"order": "lifo"}, {"tags": ["name"]}, {"order": "uniform"}])
@pytest.mark.usefixtures("no_heartbeats")
def test_another_order_or_other_tags_are_refused(
    client: Client, namespace: str, other: dict[str, Any], tmp_path: Path
) -> None:
    stream = open_task(client, namespace, "priority")
    fill(stream, "priority", 3)
    stream.save(tmp_path / "task")
    back = ExperienceStream(client, "to", namespace=namespace, **other)
    before = everything(client, namespace)
    with pytest.raises(TaskMismatch, match=r"order|tags"):
        back.resume(tmp_path / "task")
    assert everything(client, namespace) == before


@pytest.fixture
def saved(client: Client, namespace: str, tmp_path: Path) -> bytes:
    """Bytes of a task with something of everything."""
    stream = open_task(client, namespace, "priority")
    fill(stream, "priority", 4)
    stream.take(1, timeout=0).reject("no good")
    stream.save(tmp_path / "whole")
    stream.clear()
    return (tmp_path / "whole").read_bytes()


@pytest.mark.usefixtures("no_heartbeats")
def test_damage_is_found_before_anything_is_changed(
    client: Client, namespace: str, saved: bytes, tmp_path: Path
) -> None:
    back = ExperienceStream(client, "to", namespace=namespace)
    before = everything(client, namespace)
    path = tmp_path / "damaged"

    def refused(data: bytes) -> None:
        path.write_bytes(data)
        with pytest.raises(DecodeError):
            back.resume(path)

    for length in range(0, len(saved), 3):
        refused(saved[:length])
    for place in range(0, len(saved), 3):
        refused(saved[:place] + bytes([saved[place] ^ 0x41]) + saved[place + 1 :])
    refused(saved + b"x")
    refused(saved[: len(saved) // 2] + saved[len(saved) // 2 + 1 :])
    assert everything(client, namespace) == before
    path.write_bytes(saved)
    back.resume(path)
    audit(back)


def test_newer_files_and_others_are_refused(
    client: Client, namespace: str, saved: bytes, tmp_path: Path
) -> None:
    back = ExperienceStream(client, "to", namespace=namespace)
    path = tmp_path / "file"
    for version, advice in ((VERSION + 1, "upgrade"), (1, "the redrb of the save")):
        path.write_bytes(PREFIX.pack(MAGIC, version, 0) + saved[PREFIX.size :])
        with pytest.raises(DecodeError, match=advice):
            back.resume(path)
    path.write_bytes(b"PK" + saved)
    with pytest.raises(DecodeError, match="redrb save"):
        back.resume(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        back.resume(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"is a directory: give a file"):
        back.resume(tmp_path)
    assert len(back) == 0


def frames_of(data: bytes) -> list[tuple[int, Any, bytes]]:
    found, place = [], PREFIX.size
    while place < len(data) - 16:
        kind, head, payload = FRAME.unpack_from(data, place)
        place += FRAME.size
        found.append(
            (
                kind,
                msgpack.unpackb(data[place : place + head]),
                data[place + head : place + head + payload],
            )
        )
        place += head + payload
    return found


def file_of(frames: list[tuple[int, Any, bytes]]) -> bytes:
    data = PREFIX.pack(MAGIC, VERSION, 0)
    for kind, head, payload in frames:
        packed = msgpack.packb(head)
        data += FRAME.pack(kind, len(packed), len(payload)) + packed + payload
    return bytes(data + xxhash.xxh3_128_digest(data))


@pytest.mark.usefixtures("no_heartbeats")
def test_a_forged_file_is_refused(
    client: Client, namespace: str, saved: bytes, tmp_path: Path
) -> None:
    back = ExperienceStream(client, "to", namespace=namespace)
    before = everything(client, namespace)
    path = tmp_path / "file"
    frames = frames_of(saved)
    assert file_of(frames) == saved

    def changed(kind: Kind, change: Callable[[Any], Any]) -> bytes:
        made = list(frames)
        place = next(i for i, frame in enumerate(made) if frame[0] == kind)
        head = msgpack.unpackb(msgpack.packb(made[place][1]))
        result = change(head)
        made[place] = (kind, head if result is None else result, made[place][2])
        return file_of(made)

    def put(place: Any, value: Any) -> Callable[[Any], Any]:
        return lambda head: head.__setitem__(place, value)

    bad = [
        changed(Kind.HEADER, lambda _: []),
        changed(Kind.HEADER, put("groups", ["a:b"])),
        changed(Kind.HEADER, put("groups", ["default", "default"])),
        changed(Kind.HEADER, put("last", 1)),
        changed(Kind.HEADER, put("version", -1)),
        changed(Kind.HEADER, put("settings", {"tags": "{"})),
        changed(Kind.HEADER, put("settings", {})),
        changed(Kind.GROUP, lambda _: 7),
        changed(Kind.GROUP, put(0, 10**9)),
        changed(Kind.GROUP, put(0, 0)),
        changed(Kind.GROUP, put(1, "1 completed 0 - - - 0 1")),
        changed(Kind.GROUP, put(1, "1 unheard-of 0 - - - 0 1 - -")),
        changed(Kind.GROUP, put(1, "1 completed nan - - - 0 1 - -")),
        changed(Kind.GROUP, put(2, "yesterday")),
        changed(Kind.GROUP, put(2, [[9, "", "", 0, 0]])),
        changed(Kind.GROUP, put(2, [[0, "", "", 0, 0], [0, "", "", 0, 0]])),
        changed(Kind.DEAD_LETTER, put(0, "*")),
        changed(Kind.GROUP, put(2, [])),
        changed(Kind.END, put("groups", 99)),
        changed(Kind.END, put("dead_letters", 0)),
        file_of(frames[1:]),
        file_of([frames[0], *frames]),
        file_of([frames[0], frames[2], frames[1], *frames[3:]]),
        file_of(frames[:-1]),
        file_of([(77, {}, b""), *frames]),
        PREFIX.pack(MAGIC, VERSION, 0) + FRAME.pack(1, 2**32 - 1, 2**64 - 1) + bytes(64),
        PREFIX.pack(MAGIC, VERSION, 0) + struct.pack("<BIQ", 1, 1 << 20, 1 << 28) + bytes(64),
    ]
    for data in bad:
        path.write_bytes(data)
        with pytest.raises(DecodeError):
            back.resume(path)
    assert everything(client, namespace) == before


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let a put of a resume have a few groups; returns their number."""
    monkeypatch.setattr(resuming, "PAGE_GROUPS", 4)
    return 4


class Killed(BaseException):
    """Ends a call as SIGKILL ends a process."""


def die() -> None:
    raise Killed


@contextmanager
def at_request(at: int, act: Callable[[], object], *, late: bool = True) -> Iterator[list[int]]:
    """Let something happen at the block's request with this number.

    Args:
        late: Whether it happens before its reply is read, after Redis has done the request.

    Yields:
        A list whose length is the number of requests so far.
    """
    exchange, once, requests = Client.exchange, Client.once, list[int]()
    caller = threading.get_ident()  # others send heartbeats

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Client, *arguments: Any) -> Any:
            if threading.get_ident() != caller:
                return real(self, *arguments)
            requests.append(len(requests))
            if len(requests) != at + 1:
                return real(self, *arguments)
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(Client, "exchange", exchange)
                inner.setattr(Client, "once", once)
                reply = real(self, *arguments) if late else None
                act()
            return reply if late else real(self, *arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "exchange", counting(exchange))
        patch.setattr(Client, "once", counting(once))
        with suppress(Killed):
            yield requests


def to_resume(
    client: Client, namespace: str, directory: Path, letters: int = 0
) -> ExperienceStream:
    """Save a task with something of everything to the file `task`; returns the task.

    Args:
        letters: Dead letters beside the one.
    """
    stream = open_task(client, namespace, "priority")
    if letters:
        stream.put_many([[numbered(100 + number)] for number in range(letters)])
        stream.take(letters, timeout=0).reject("bad")
    other = ExperienceStream(client, "from", namespace=namespace, group="other")
    for one in (stream, other):
        one.join_group()
    fill(stream, "priority", 15)
    use(stream, other)
    stream.move([letters + 9, letters + 12], Status.FAILED)
    prefix, run = stream._task.store.keys.prefix, client.at(stream._task.store.keys.stream).execute
    marks = ("completed", f"7 {letters + 8}", "expired 1 - 2", f"8 {letters + 12}")
    run("HSET", f"{prefix}refreshed", *marks)
    run("HSET", f"{prefix}sources", "a:b", "f00 4 4 ")
    run("HSET", f"{prefix}sources:a:b", "5", f"3 {'0' * 16}")
    stream.advance(3)
    stream.save(directory / "task")
    return stream


def refreshed(stream: ExperienceStream) -> dict[bytes, tuple[int, int]]:
    """Return the train step of each refresh, and how many groups it has seen of those stored."""
    store = stream._task.store
    flat = store.client.execute("HGETALL", store.keys.refreshed)
    ids = sorted(audit(stream)["default"].waiting | audit(stream)["other"].waiting)
    marks = {
        name: tuple(map(int, mark.split()))
        for name, mark in zip(flat[::2], flat[1::2], strict=True)
    }
    return {name: (step, bisect(ids, last)) for name, (step, last) in marks.items()}


def compare(back: ExperienceStream, stream: ExperienceStream) -> None:
    """Assert that a task has what the saved one has, each group once."""
    assert held(back) == held(stream)
    assert known(back) == known(stream)
    assert refreshed(back) == refreshed(stream)
    assert order_of(back) == order_of(stream)
    assert [each.id for each in back.dead_letters()] == [each.id for each in stream.dead_letters()]
    prefix, run = back._task.store.keys.prefix, back._task.store.client.execute
    assert run("HGET", f"{prefix}sources", "a:b") == b"f00 4 4 "
    assert run("HGETALL", f"{prefix}sources:a:b") == [b"5", b"0 " + b"0" * 16]
    assert back.stats().version == 3


@pytest.mark.long
@pytest.mark.parametrize(("letters", "page_bytes"), [(5, PAGE_BYTES), (2, 300)])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.usefixtures("small_pages")
def test_a_resume_that_dies_at_any_request_goes_on_and_puts_nothing_twice(
    client: Client,
    namespace: str,
    late: bool,
    letters: int,
    page_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resuming, "PAGE_BYTES", page_bytes)
    stream = to_resume(client, namespace, tmp_path, letters)
    for at in range(100):
        back = ExperienceStream(client, f"to-{at}", namespace=namespace)
        with at_request(at, die, late=late) as requests:
            back.resume(tmp_path / "task")
        back.close()
        again = ExperienceStream(client, f"to-{at}", namespace=namespace)
        for _ in range(2):  # the second time nothing is left to do
            again.resume(tmp_path / "task")
        compare(again, stream)
        again.close()
        if at >= len(requests):
            break
    assert 12 <= at < 99


@pytest.mark.long
@pytest.mark.usefixtures("small_pages")
def test_of_resumes_of_one_file_at_once_each_goes_on_and_each_group_is_put_once(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = to_resume(client, namespace, tmp_path, letters=5)
    for at in range(100):
        first = ExperienceStream(client, f"to-{at}", namespace=namespace)
        second = ExperienceStream(client, f"to-{at}", namespace=namespace)
        with at_request(at, partial(second.resume, tmp_path / "task")) as requests:
            first.resume(tmp_path / "task")
        compare(first, stream)
        for one in (first, second):
            one.close()
        if at >= len(requests):
            break
    assert 12 <= at < 99


@pytest.mark.usefixtures("small_pages")
def test_resumes_beside_others_are_not_counted_together(client: Client, tmp_path: Path) -> None:
    for turn in range(6):
        namespace = f"{uuid4().hex}-{turn}"
        stream = to_resume(client, namespace, tmp_path)
        first = ExperienceStream(client, "to", namespace=namespace)
        second = ExperienceStream(client, "to", namespace=namespace)
        with at_request(2, partial(second.resume, tmp_path / "task")):
            first.resume(tmp_path / "task")
        compare(first, stream)
        for one in (first, second, stream):
            one.close()


@pytest.mark.long
@pytest.mark.usefixtures("small_pages")
def test_of_resumes_of_two_files_at_once_one_is_refused_and_changes_nothing(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = to_resume(client, namespace, tmp_path)
    with ExperienceStream(client, "other", namespace=namespace) as other:
        other.put(numbered(1000))
        other.save(tmp_path / "other")
    for at in range(100):
        first = ExperienceStream(client, f"to-{at}", namespace=namespace, order="priority")
        second = ExperienceStream(client, f"to-{at}", namespace=namespace)
        second_failed: list[RedrbError] = []

        def resume_other(
            own: ExperienceStream = second, failed: list[RedrbError] = second_failed
        ) -> None:
            try:
                own.resume(tmp_path / "other")
            except RedrbError as error:
                failed.append(error)

        error_here = None
        with at_request(at, resume_other) as requests:
            try:
                first.resume(tmp_path / "task")
            except RedrbError as error:
                error_here = error
        if at >= len(requests):
            break
        assert (error_here is None) == bool(second_failed), "one of them is refused"
        if error_here is None:
            compare(first, stream)
        for one in (first, second):
            one.close()
    assert 12 <= at < 99


@pytest.mark.long
@pytest.mark.parametrize("lost", ["cleared", "lost"])
@pytest.mark.parametrize("again", [False, True], ids=["gone", "made anew"])
@pytest.mark.usefixtures("small_pages")
def test_a_task_that_is_gone_in_the_middle_is_not_filled_with_the_rest(
    client: Client, namespace: str, lost: str, again: bool, tmp_path: Path
) -> None:
    stream = to_resume(client, namespace, tmp_path)
    outcomes, whole = set(), stream.stats().stored
    for at in range(100):
        back = ExperienceStream(client, f"to-{at}", namespace=namespace)

        def lose(at: int = at, keys: TaskKeys = back._task.store.keys) -> None:
            with ExperienceStream(client, f"to-{at}", namespace=namespace) as own:
                if lost == "cleared":
                    own.clear()
                else:
                    client.execute("DEL", *client.execute("KEYS", f"{keys.prefix}*"))
                if again:
                    own.put(numbered(7))

        failed = False
        with at_request(at, lose) as requests:
            try:
                back.resume(tmp_path / "task")
            except (StoreError, ConfigError):
                failed = True
        own = ExperienceStream(client, f"to-{at}", namespace=namespace)
        stored = own.stats().stored
        outcomes.add((failed, stored))
        assert stored in (0, 1, whole, 1 + whole)
        back.close()
        own.clear()
        own.resume(tmp_path / "task")
        compare(own, stream)
        own.close()
        if at >= len(requests):
            break
    assert (True, int(again)) in outcomes


def test_groups_that_are_put_and_taken_during_a_resume_are_done_once(
    client: Client, namespace: str, small_pages: int, tmp_path: Path
) -> None:
    count = 3 * small_pages
    stream = ExperienceStream(client, "from", namespace=namespace)
    stream.put_many([[numbered(number)] for number in range(count)])
    stream.save(tmp_path / "task")
    for at in range(100):
        back = ExperienceStream(client, f"to-{at}", namespace=namespace)
        own = ExperienceStream(client, f"to-{at}", namespace=namespace)
        done: list[int] = []

        def use_it(own: ExperienceStream = own, done: list[int] = done) -> None:
            own.put(numbered(1000))
            with suppress(BatchTimeout):
                lease = own.take(2, timeout=0)
                done.extend(numbers(lease))
                lease.ack()
            raise Killed

        with at_request(at, use_it) as requests:
            back.resume(tmp_path / "task")
        over = at >= len(requests)
        with suppress(ConfigError):  # it holds the group of the maker alone, or was used since
            back.resume(tmp_path / "task")
        left = numbers(own.take(back.stats().stored, timeout=0))
        of_file = sorted(number for number in done + left if number < 1000)
        assert of_file == [*range(count)] or not of_file
        assert (done + left).count(1000) == (0 if over else 1)
        for one in (back, own):
            one.close()
        if over:
            break
    assert 8 <= at < 99


@pytest.mark.parametrize("kind", ["bounded", "stalest", "prioritized", "tagged"])
def test_requests_that_are_repeated_put_nothing_twice(
    client: Client, namespace: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_task(client, namespace, kind)
    other = ExperienceStream(client, "from", namespace=namespace, group="other")
    other.join_group()
    fill(stream, kind, 40)
    use(stream, other)
    before = held(stream)
    exchange, once = Client.exchange, Client.once

    def exchange_twice(self: Client, pipeline: Pipeline) -> list[Any]:
        exchange(self, pipeline)
        return exchange(self, pipeline)

    def once_twice(self: Client, *arguments: Any) -> Any:
        once(self, *arguments)
        return once(self, *arguments)

    back = ExperienceStream(client, "to", namespace=namespace)
    monkeypatch.setattr(Client, "exchange", exchange_twice)
    monkeypatch.setattr(Client, "once", once_twice)
    stream.save(tmp_path / "task")
    back.resume(tmp_path / "task")
    monkeypatch.undo()
    assert held(back) == before
    assert len(back.dead_letters()) == 1


def test_a_save_that_fails_leaves_the_older_file(
    client: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace)
    fill(stream, "plain", 3)
    path = tmp_path / "task"
    stream.save(path)
    older = path.read_bytes()

    def broken(self: TaskReader) -> Iterator[Any]:
        raise StoreError("away")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(TaskReader, "groups", broken)
        with pytest.raises(StoreError, match="away"):
            stream.save(path)
    assert path.read_bytes() == older
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="cannot be written"):
        stream.save(tmp_path / "none" / "task")
    stream.clear()
    with pytest.raises(ConfigError, match="no task"):
        stream.save(path)
    assert path.read_bytes() == older


@pytest.mark.long
@pytest.mark.parametrize("kind", ["stalest", "tagged"])
def test_a_group_that_is_stored_during_the_whole_save_is_saved_once(
    client: Client, namespace: str, kind: str, tmp_path: Path
) -> None:
    stream = open_task(client, namespace, kind)
    quiet = ExperienceStream(client, "from", namespace=namespace, group="quiet")
    for one in (stream, quiet):
        one.join_group()
    fill(stream, kind, 60)
    stream.put(numbered(60, policy_version=1))
    over = threading.Event()

    def work(act: Callable[[ExperienceStream], object]) -> threading.Thread:
        own = ExperienceStream(client, "from", namespace=namespace)

        def loop() -> None:
            while not over.is_set():
                with suppress(BatchTimeout):
                    act(own)
            own.close()

        return threading.Thread(target=loop)

    workers = [
        work(lambda own: own.put(numbered(1000, policy_version=1))),
        work(lambda own: own.take(3, timeout=0).ack()),
        work(lambda own: own.take(2, timeout=0).release()),
    ]
    for worker in workers:
        worker.start()
    try:
        for number in range(3):
            stream.save(tmp_path / f"{number}")
    finally:
        over.set()
        for worker in workers:
            worker.join()
    left = {number for number in held(stream)["default"] if number < 1000}
    for number in range(3):
        back = open_task(client, namespace, kind, f"to-{number}")
        back.resume(tmp_path / f"{number}")
        found = held(back)
        assert [number for number in found["quiet"] if number < 1000] == [*range(61)]
        assert left <= set(found["default"])
        assert len(set(found["default"]) - {1000}) == len(found["default"]) - found[
            "default"
        ].count(1000)
        for group in ("default", "quiet"):
            own = ExperienceStream(client, f"to-{number}", namespace=namespace, group=group)
            assert own.stats().ledger.balanced


@pytest.mark.parametrize("seed", range(6))
def test_a_task_of_any_past_is_saved_and_resumed(
    client: Client, namespace: str, seed: int, tmp_path: Path
) -> None:
    dice = random.Random(seed)
    kind = dice.choice([*TASKS])
    stream = open_task(client, namespace, kind)
    others = [
        ExperienceStream(client, "from", namespace=namespace, group=name) for name in ("a", "b")
    ]
    streams, leases = [stream, *others], []
    for _ in range(60):
        one = dice.choice(streams)
        match dice.randrange(7):
            case 0 | 1:
                fill(stream, kind, dice.randint(1, 3))
            case 2 | 3:
                with suppress(BatchTimeout):
                    leases.append(one.take(dice.randint(1, 3), timeout=0))
            case 4 if leases:
                lease = leases.pop(dice.randrange(len(leases)))
                dice.choice([lease.ack, lease.release, lambda own=lease: own.reject("so")])()
            case 5 if stream.stats().joined and kind not in ("plain", "bounded"):
                ids = sorted(audit(one)[one.group].waiting)[:2] if one.group in audit(one) else []
                one.move(ids, dice.choice([*Status]))
            case 6 if dice.random() < 0.3:
                one.join_group()
    before = held(stream)
    stream.save(tmp_path / "task")
    for lease in leases:
        lease.release()
    back = ExperienceStream(client, "to", namespace=namespace)
    back.resume(tmp_path / "task")
    assert held(back) == before
    for one in streams:
        own = ExperienceStream(client, "to", namespace=namespace, group=one.group)
        assert own.counts() == one.counts()
        if TASKS[kind].get("order") not in DRAWN and before.get(one.group):
            assert order_of(own) == order_of(one)
    audit(back)
