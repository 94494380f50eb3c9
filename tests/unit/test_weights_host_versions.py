"""Versions that the processes of a host share: locks, waits, removal, what killed writers left."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest

from redrb import forks
from redrb.weights.host import locks
from redrb.weights.host.versions import HostVersions


@pytest.fixture(params=["", "weights"], ids=["files", "folders"])
def content(request):
    return request.param


@pytest.fixture
def versions(tmp_path, content):
    """Make objects that share `tmp_path`, as in processes of their own."""
    return lambda: HostVersions(tmp_path, "key", content)


def writer(text, content=""):
    def write(part: Path) -> None:
        if content:
            part.mkdir()
        (part / content).write_text(text)

    return write


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_version_is_written_once_and_removed_when_nobody_uses_it(versions, tmp_path, content):
    one, other = versions(), versions()
    assert one.open("v1") is None
    first = one.use("v1", writer("1", content), timeout=0)
    again = other.use("v1", writer("not called", content), timeout=0)
    assert (other.path("v1") / content).read_text() == "1"
    first.release()
    second = one.use("v2", writer("2", content), timeout=0)
    one.remove_unused()
    assert names(tmp_path) == ["key.v1", "key.v2"], "the other one has v1 still"
    again.release()
    other.remove_unused()
    assert names(tmp_path) == ["key.v2"]
    second.release()
    second.release()
    other.remove_unused()
    assert names(tmp_path) == []


def test_a_version_that_cannot_be_written_leaves_nothing(versions, tmp_path, content):
    one = versions()

    def full(part):
        writer("half", content)(part)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        one.use("v1", full, timeout=0)
    assert names(tmp_path) == []
    assert one.use("v1", writer("1", content), timeout=0) is not None


def test_what_a_killed_writer_left_is_replaced_or_removed(versions, tmp_path, content):
    for _ in range(2):
        writer("half", content)(tmp_path / "key.part")
        os.mkfifo(tmp_path / "key.lock")
        versions().remove_unused()
        assert names(tmp_path) == []
    writer("half", content)(tmp_path / "key.part")
    lock = versions().use("v1", writer("1", content), timeout=0)
    assert names(tmp_path) == ["key.v1"]
    assert (tmp_path / "key.v1" / content).read_text() == "1"
    lock.release()


def test_files_of_others_are_left_alone(versions, tmp_path, content):
    (tmp_path / "key.d").mkdir()
    (tmp_path / "keys.txt").write_text("not ours")
    if content:
        (tmp_path / "key.txt").write_text("not ours")
        versions().remove_unused()
        assert names(tmp_path) == ["key.d", "key.txt", "keys.txt"]


def test_the_users_of_a_version_lock_it_while_its_memory_exists(versions, tmp_path):
    class Memory:
        pass

    one, memory = HostVersions(tmp_path, "key"), Memory()
    one.use("v1", writer("1"), timeout=0).hold_while_alive(memory)
    gc.collect()
    one.remove_unused()
    assert names(tmp_path) == ["key.v1"]
    del memory
    one.remove_unused()
    assert names(tmp_path) == []


def test_an_ending_process_releases_its_memory(tmp_path):
    class Memory:
        pass

    one, memory = HostVersions(tmp_path, "key"), Memory()
    one.use("v1", writer("1"), timeout=0).hold_while_alive(memory)
    locks.release_memory()
    one.remove_unused()
    assert names(tmp_path) == []


def test_a_version_that_was_renamed_in_the_meantime_is_not_opened(tmp_path, monkeypatch):
    one, opened = HostVersions(tmp_path, "key"), os.open
    one.use("v1", writer("1"), timeout=0).release()

    def slowly(path, *arguments):
        descriptor = opened(path, *arguments)
        monkeypatch.setattr(os, "open", opened)
        one.path("v1").rename(tmp_path / "key.part")
        return descriptor

    monkeypatch.setattr(os, "open", slowly)
    assert one.open("v1") is None


def test_one_writes_at_a_time_and_the_others_use_its_version(versions, content):
    written, used, barrier = [], [], threading.Barrier(8)

    def write(part):
        written.append(part)
        threading.Event().wait(0.05)
        writer("1", content)(part)

    def run():
        barrier.wait()
        used.append(versions().use("v1", write, timeout=20))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(written) == 1
    assert all(used)
    assert len(used) == 8


def test_the_wait_for_a_writer_ends_with_the_timeout(versions, tmp_path):
    lock = locks.acquire_fifo(tmp_path / "key.lock")
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="writes key"):
        versions().use("v1", writer("1"), timeout=0.05)
    versions().remove_unused()
    assert 0.05 <= time.monotonic() - started < 4
    lock.release()


def test_a_process_that_waited_for_another_version_learns_that_its_own_is_missing(
    versions, content
):
    one, other = versions(), versions()
    found = []

    def write(part):
        found.append(threading.Thread(target=wait))
        found[0].start()
        threading.Event().wait(0.02)
        writer("1", content)(part)

    def wait():
        found.append(other.use("v2", writer("2", content), timeout=20))

    one.use("v1", write, timeout=0).release()
    found[0].join(30)
    assert found[1] is None or other.path("v2").exists()  # it may have come after the writer


def test_wait_ends_with_the_lock_or_the_timeout(tmp_path):
    path = tmp_path / "fifo"
    assert locks.wait_released(path, 0)
    lock = locks.acquire_fifo(path)
    assert locks.acquire_fifo(path) is None
    assert not locks.wait_released(path, 0)
    assert not locks.wait_released(path, -1)
    woken = []
    threads = [
        threading.Thread(target=lambda: woken.append(locks.wait_released(path, 1e12)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    assert not locks.wait_released(path, 0.05)
    lock.release()
    for thread in threads:
        thread.join(5)
    assert woken == [True] * 8


def test_a_waiter_wakes_even_if_the_next_one_locks_at_once(tmp_path):
    path, woken = tmp_path / "fifo", []
    lock = locks.acquire_fifo(path)
    thread = threading.Thread(target=lambda: woken.append(locks.wait_released(path, 20)))
    thread.start()
    while watchers(path) < 2:
        threading.Event().wait(0.001)
    path.unlink()  # as at the end of a write
    lock.release()
    following = locks.acquire_fifo(path)
    thread.join(5)
    assert woken == [True]
    following.release()


def watchers(path):
    """How many descriptors of this process are at `path`; none of them in passing."""
    with forks.guard:
        descriptors = list(Path("/proc/self/fd").iterdir())
        return sum(at.exists() and at.samefile(path) for at in descriptors)


def test_no_descriptor_stays_open(versions, content):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for number in range(20):
        versions().use(f"v{number}", writer("1", content), timeout=0)
        versions().remove_unused()
    gc.collect()
    assert count() == before
