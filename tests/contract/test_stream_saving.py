"""Save and resume: the resumed task equals the saved one, or nothing has changed."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgpack
import pytest
import xxhash

from redrb import BatchTimeout, ConfigError, ExperienceStream, StoreFull, TaskMismatch
from redrb.connection import Client
from redrb.connection.transport import Pipeline
from redrb.errors import DecodeError, StoreError
from redrb.experience import Status
from redrb.stream.saving.file import FRAME, MAGIC, PREFIX, Kind
from redrb.stream.saving.restoring import Restoring
from redrb.stream.saving.snapshot import TaskReader
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


def held(stream: ExperienceStream) -> dict[str, frozenset[int]]:
    """Return the groups that each consumer group needs still, after an audit."""
    return {
        name: holdings.waiting | holdings.leased.keys() for name, holdings in audit(stream).items()
    }


def raw(stream: ExperienceStream, *kinds: str) -> list[Any]:
    """Return hashes and sorted sets of a task."""
    prefix, run = stream._task.store.keys.prefix, stream._task.store.client.execute
    found: list[Any] = []
    for kind in kinds:
        if run("TYPE", prefix + kind) == b"zset":
            found.append(run("ZRANGE", prefix + kind, 0, -1, "WITHSCORES"))
        else:
            flat = run("HGETALL", prefix + kind)
            values = map(unpack_facts, flat[1::2]) if kind == "facts" else flat[1::2]
            found.append(dict(zip(flat[::2], values, strict=True)))
    return found


def order_of(stream: ExperienceStream) -> dict[Status, list[int]]:
    """Take everything in every status, and give it back."""
    found = {}
    for status in Status:
        count = stream.count(status)
        if count:
            lease = stream.take(count, timeout=0, status=status)
            found[status] = list(lease.ids)
            lease.release()
    return found


def everything(client: Client, namespace: str) -> dict[bytes, bytes]:
    """Return all that a server holds of a namespace."""
    keys = client.execute("KEYS", f"redrb:{{{namespace}:*")
    return {key: client.execute("DUMP", key) for key in sorted(keys)}


def no_stage(stream: ExperienceStream) -> bool:
    prefix = stream._task.store.keys.prefix
    return not stream._task.store.client.execute("KEYS", f"{prefix}restoring*")


@pytest.mark.parametrize("kind", TASKS)
def test_a_resumed_task_equals_the_saved_one(
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
        stream.move([max(held(stream)["default"])], Status.FAILED)
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
    now = back.stats()
    assert now.ledger.leased == 0
    ledger = {**was.ledger.as_dict(), "leased": 0, "waiting": was.ledger.waiting + 2}
    assert now.ledger.as_dict() == ledger
    for name in ("stored", "limit", "max_bytes", "version", "samples_put", "bytes_put"):
        assert getattr(now, name) == getattr(was, name), name
    assert (now.reads, now.dead_letters, now.samples_acked) == (was.reads, 1, was.samples_acked)
    assert [letter.reason for letter in back.dead_letters()] == ["no good"]
    own = ("facts", "deliveries:default", "deliveries:other")
    assert raw(back, *own) == raw(stream, *own)
    own = ("moved:default", "expiries:default", "staleness:default")
    assert raw(back, *own) == raw(stream, *own)
    assert back.counts() == stream.counts()
    drawn = TASKS[kind].get("order") in DRAWN
    assert drawn or order_of(back) == order_of(stream)
    audit(back)
    assert no_stage(back)

    item = numbered(99, policy_version=99)
    first, second = back.put(item), stream.put(item)
    assert first == second
    audit(back)
    back.take(1, timeout=0).ack()
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
    back.move([3], Status.FAILED)
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
    assert found == [1, 2, 3]
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
    stream.take(3, timeout=0).ack()
    with pytest.raises(ConfigError, match="clear"):  # its ledger would be lost
        stream.resume(tmp_path / "task")
    stream.clear()
    assert stream.resume(tmp_path / "task").groups == 3
    assert len(stream) == 3


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
    path.write_bytes(PREFIX.pack(MAGIC, 2, 0) + saved[PREFIX.size :])
    with pytest.raises(DecodeError, match="upgrade"):
        back.resume(path)
    path.write_bytes(b"PK" + saved)
    with pytest.raises(DecodeError, match="redrb save"):
        back.resume(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        back.resume(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"holds no saved_tasks\.json, .*give a file"):
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
    data = PREFIX.pack(MAGIC, 1, 0)
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
        changed(Kind.HEADER, put("groups", [{"name": "a:b"}])),
        changed(Kind.HEADER, put("counters", {"last": 1})),
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
        changed(Kind.PRODUCERS, lambda _: {"a": "1 or so"}),
        changed(Kind.PRODUCERS, lambda _: {"epoch": "1 1 1"}),
        changed(Kind.END, put("groups", 99)),
        changed(Kind.END, put("waiting", [])),
        file_of(frames[1:]),
        file_of([frames[0], *frames]),
        file_of([frames[0], frames[2], frames[1], *frames[3:]]),
        file_of(frames[:-1]),
        file_of([(77, {}, b""), *frames]),
        PREFIX.pack(MAGIC, 1, 0) + FRAME.pack(1, 2**32 - 1, 2**64 - 1) + bytes(64),
        PREFIX.pack(MAGIC, 1, 0) + struct.pack("<BIQ", 1, 1 << 20, 1 << 28) + bytes(64),
    ]
    for data in bad:
        path.write_bytes(data)
        with pytest.raises(DecodeError):
            back.resume(path)
    assert everything(client, namespace) == before


def to_resume(client: Client, namespace: str, directory: Path) -> ExperienceStream:
    """Save a task to the file `task`; returns a stream that can resume it."""
    stream = open_task(client, namespace, "priority")
    fill(stream, "priority")
    stream.save(directory / "task")
    return ExperienceStream(client, "to", namespace=namespace)


def before_the_end(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen right before the last step of a resume."""
    end = Restoring.end

    def late(self: Restoring) -> None:
        act()
        end(self)

    monkeypatch.setattr(Restoring, "end", late)


def test_a_group_put_during_a_resume_stays_and_the_resume_fails(
    client: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = to_resume(client, namespace, tmp_path)
    before_the_end(monkeypatch, lambda: back.put(numbered(77)))
    with pytest.raises(ConfigError, match="not new"):
        back.resume(tmp_path / "task")
    audit(back)
    assert numbers(back.take(1, timeout=0)) == [77]
    assert no_stage(back)


def test_settings_given_during_a_resume_stay_and_the_resume_fails(
    client: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = to_resume(client, namespace, tmp_path)
    other = {"namespace": namespace, "order": "lifo"}
    before_the_end(monkeypatch, lambda: ExperienceStream(client, "to", **other))
    with pytest.raises(ConfigError, match="order"):
        back.resume(tmp_path / "task")
    assert len(back) == 0
    assert no_stage(back)


def test_a_resume_that_died_is_cleaned_up_by_the_next(
    client: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = to_resume(client, namespace, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Restoring, "end", Mock(side_effect=KeyboardInterrupt))
        patch.setattr(Restoring, "give_up", Mock())
        with pytest.raises(KeyboardInterrupt):
            back.resume(tmp_path / "task")
    assert not no_stage(back)
    prefix = back._task.store.keys.prefix
    for key in client.execute("KEYS", f"{prefix}restoring*"):
        assert client.execute("PTTL", key) > 0, key
    assert len(back) == 0
    with pytest.raises(BatchTimeout):
        back.take(1, timeout=0)
    back.resume(tmp_path / "task")
    assert held(back).keys() == {"default"}
    assert no_stage(back)
    for key in client.execute("KEYS", f"{prefix}*"):
        assert client.execute("PTTL", key) == -1, key
    audit(back)


def test_of_two_resumes_the_later_one_wins(
    client: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_task(client, namespace, "stalest")
    fill(stream, "stalest")
    stream.save(tmp_path / "task")
    first = ExperienceStream(client, "to", namespace=namespace)
    second = ExperienceStream(client, "to", namespace=namespace)
    real = Restoring.group
    pending = [second]

    def group(self: Restoring, *arguments: Any) -> None:
        if pending:
            pending.pop().resume(tmp_path / "task")
        real(self, *arguments)

    monkeypatch.setattr(Restoring, "group", group)
    with pytest.raises((StoreError, ConfigError)):
        first.resume(tmp_path / "task")
    assert no_stage(first)
    assert order_of(second) == order_of(stream)
    assert held(second) == held(stream)


@pytest.mark.parametrize("kind", ["bounded", "stalest", "prioritized", "tagged"])
def test_requests_that_are_repeated_restore_nothing_twice(
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
    assert no_stage(back)


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


def test_a_put_that_landed_is_not_put_again_after_a_resume(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    stream = ExperienceStream(client, "from", namespace=namespace)
    stream.put(numbered(1))
    (producers,) = raw(stream, "producers")
    stream.save(tmp_path / "task")
    back = ExperienceStream(client, "to", namespace=namespace)
    back.resume(tmp_path / "task")
    assert raw(back, "producers") == [producers]


@pytest.mark.parametrize("kind", ["stalest", "tagged"])
def test_a_group_that_is_stored_during_the_whole_save_is_saved_once(
    client: Client, namespace: str, kind: str, tmp_path: Path
) -> None:
    stream = open_task(client, namespace, kind)
    quiet = ExperienceStream(client, "from", namespace=namespace, group="quiet")
    for one in (stream, quiet):
        one.join_group()
    fill(stream, kind, 60)
    last = stream.put(numbered(0, policy_version=1))[0]
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
        work(lambda own: own.put(numbered(5, policy_version=1))),
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
    left = {seq for seq in held(stream)["default"] if seq <= last}
    for number in range(3):
        back = open_task(client, namespace, kind, f"to-{number}")
        back.resume(tmp_path / f"{number}")
        found = held(back)
        assert set(range(1, last + 1)) <= found["quiet"]
        assert left <= found["default"]
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
                ids = sorted(held(one).get(one.group, ()))[:2]
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
