"""The host cache within one process: buffers, locks, waits, damage, files left behind."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from redrb.errors import ConfigError, WeightError
from redrb.weights.host import buffer_reading, locks
from redrb.weights.host import cache as host_cache
from redrb.weights.host.buffer import HEADER_BYTES, PAGE, Buffer, Header
from redrb.weights.host.cache import HostCache

NBYTES = 3 * PAGE + 17


@pytest.fixture
def caches(tmp_path):
    """Make caches that share `tmp_path`, and close them at the end."""
    made = []

    def make(key="weights"):
        made.append(HostCache(key, directory=tmp_path / "shm"))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def write(cache, version, *, nbytes=NBYTES, meta=b"meta"):
    with cache.lead() as lead:
        filling = lead.buffer(nbytes)
        filling.begin()
        filling.data[:] = version
        filling.commit(version, meta)


def newest_version(cache):
    held = cache.newest()
    if held is None:
        return None
    with held:
        assert (held.data == held.version).all()
        return held.version


def home(tmp_path):
    (found,) = (path for path in (tmp_path / "shm").iterdir() if len(path.name) == 32)
    return found


def test_a_committed_buffer_is_mapped_by_other_processes(caches):
    one, other = caches(), caches()
    assert one.newest() is None
    write(one, 7, meta=b"\x00manifest" * 9999)
    with other.newest() as held:
        assert (held.version, held.meta) == (7, b"\x00manifest" * 9999)
        assert held.data.shape == (NBYTES,)
        assert held.data.dtype == np.uint8
        assert (held.data == 7).all()


def test_nothing_is_made_before_the_first_use(caches, tmp_path):
    cache = caches()
    assert not (tmp_path / "shm").exists()
    assert "HostCache" in repr(cache)
    cache.close()
    assert not (tmp_path / "shm").exists()


def test_caches_of_different_keys_are_independent(caches):
    one, other = caches("a"), caches("b")
    write(one, 1)
    assert other.newest() is None
    with one.lead(), other.lead() as lead:
        assert lead is not None


def test_pages_that_a_reader_writes_are_private(caches):
    cache, other = caches(), caches()
    write(cache, 1)
    with cache.newest() as held, cache.newest() as again, other.newest() as others:
        held.data[:PAGE] = 9
        assert (held.data[:PAGE] == 9).all()
        assert (held.data[PAGE:] == 1).all()
        assert (again.data == 1).all()
        assert (others.data == 1).all()
        mine = held.lend()
    assert newest_version(cache) == 1
    write(cache, 2)
    with cache.lead() as lead:
        assert (lead.buffer(NBYTES, timeout=0).data == 0).all()  # a new one: the old one is lent
    assert (mine[:PAGE] == 9).all()
    assert (mine[PAGE:] == 1).all()


def test_the_older_buffer_is_written_and_keeps_its_content(caches):
    cache = caches()
    write(cache, 1, meta=b"one")
    write(cache, 2)
    with cache.newest() as held, cache.lead() as lead:
        assert held.version == 2
        filling = lead.buffer(NBYTES)
        assert (filling.version, filling.meta) == (1, b"one")
        assert (filling.data == 1).all()
        with pytest.raises(ValueError, match="read-only"):
            filling.data[0] = 3
        filling.begin()
        assert filling.version == 0
        filling.data[5:] += 2
        filling.data[:5] = 3
        filling.commit(3, b"three")
        assert (held.data == 2).all()
        assert newest_version(cache) == 3


def test_a_buffer_that_was_begun_is_not_seen_until_it_is_committed(caches):
    cache, reader = caches(), caches()
    write(cache, 1)
    with cache.lead() as lead:
        filling = lead.buffer(NBYTES)
        assert filling.version == 0
        filling.begin()
        assert newest_version(reader) == 1
        filling.data[:] = 2
        assert newest_version(reader) == 1
    assert newest_version(reader) == 1
    with cache.lead() as lead:
        assert lead.buffer(NBYTES).version == 0


def test_a_buffer_that_was_not_begun_stays_usable(caches):
    cache = caches()
    write(cache, 1)
    write(cache, 2)
    with cache.lead() as lead:
        lead.buffer(NBYTES)
    with cache.lead() as lead:
        assert lead.buffer(NBYTES).version == 1


def test_readers_are_waited_for_and_then_keep_the_old_buffer(caches):
    cache, reader = caches(), caches()
    write(cache, 1)
    held = reader.newest()
    write(cache, 2)
    with cache.lead() as lead:
        started = time.monotonic()
        threading.Timer(0.05, held.close).start()
        filling = lead.buffer(NBYTES, timeout=5)
        assert filling.version == 1
        assert 0.05 <= time.monotonic() - started < 4
    held = reader.newest()
    write(cache, 3)
    with cache.lead() as lead:
        started = time.monotonic()
        filling = lead.buffer(NBYTES, timeout=0.05)
        assert filling.version == 0
        assert 0.05 <= time.monotonic() - started < 4
        filling.begin()
        filling.data[:] = 4
        assert (held.data == 2).all()
        filling.commit(4, b"")
    assert newest_version(reader) == 4
    assert (held.data == 2).all()
    held.close()
    write(cache, 5)
    assert newest_version(reader) == 5


def test_a_reader_that_is_late_for_a_buffer_that_was_replaced_gets_the_new_one(caches, monkeypatch):
    """It has the lock that was at the path, and reads the file that came there since."""
    cache, reader = caches(), caches()
    write(cache, 1)
    write(cache, 2)
    read, found = Buffer.read, []

    def slowly(buffer):
        monkeypatch.setattr(Buffer, "read", read)
        write(cache, 3)
        write(cache, 4)
        with cache.lead() as lead:  # half of version 5 is in what the reader looked for
            filling = lead.buffer(NBYTES, timeout=0)
            filling.begin()
            filling.data[:9] = 5
            write_again(buffer)
            filling.data[:] = 5
            filling.commit(5, b"")
        return found[0]

    def write_again(buffer):
        found.append(read(buffer))

    monkeypatch.setattr(Buffer, "read", slowly)
    assert newest_version(reader) == 5
    assert len(found) == 1


def test_an_older_version_does_not_pass_for_the_newest_while_that_is_being_unlocked(
    caches, tmp_path, monkeypatch
):
    """As when a leader dies after its commit: the leadership is free a moment before its buffer."""
    cache, reader = caches(), caches()
    write(cache, 1)
    write(cache, 2)
    lock = locks.acquire(home(tmp_path) / "1", exclusive=True)
    threading.Timer(0.05, lock.release).start()
    assert newest_version(reader) == 2
    monkeypatch.setattr(buffer_reading, "_BRIEFLY_LOCKED_S", 0.05)
    lock = locks.acquire(home(tmp_path) / "1", exclusive=True)
    assert newest_version(reader) == 1  # it stays locked: better than none
    lock.release()


def test_a_reader_that_is_dropped_holds_nothing(caches):
    cache, reader = caches(), caches()
    write(cache, 1)
    data = reader.newest().data
    gc.collect()
    write(cache, 2)
    write(cache, 3)
    assert newest_version(cache) == 3
    assert data.size == NBYTES  # still mapped


def is_free(lock):
    """Whether nobody has the lock at `lock`."""
    lock = locks.acquire(lock, exclusive=True)
    if lock is None:
        return False
    lock.release()
    return True


@pytest.mark.parametrize(
    "use",
    [
        lambda data: data,
        lambda data: data[PAGE : PAGE + 40].reshape(4, 10),
        lambda data: torch.from_numpy(data[8:72]).view(torch.float32),
        lambda data: torch.from_numpy(data)[5:],
        memoryview,
    ],
    ids=["array", "slice", "tensor", "view of a tensor", "memoryview"],
)
def test_lent_data_outlive_the_reader_and_the_cache(caches, tmp_path, use):
    cache = caches()
    write(cache, 1)
    lock = home(tmp_path) / "0"
    reader = HostCache("weights", directory=tmp_path / "shm")
    with reader.newest() as held:
        used = use(held.lend())
        assert held.lend() is held.lend()
    held.close()
    del held
    assert not is_free(lock)
    reader.close()
    del reader
    assert not is_free(lock)
    assert set(np.asarray(used).tobytes()) == {1}
    del used
    assert is_free(lock)


def test_lent_data_stay_when_leaders_write_and_files_are_deleted(caches, tmp_path):
    models = {}
    for version in range(1, 8):
        cache = HostCache("weights", directory=tmp_path / "shm")
        with cache.lead() as lead:
            filling = lead.buffer(NBYTES, timeout=0)
            filling.begin()
            filling.data[:] = version
            filling.commit(version, b"")
        with cache.newest() as held:
            models[version] = torch.from_numpy(held.lend())
        if version % 3 == 0:
            del held
            cache.close()
            assert list((tmp_path / "shm").iterdir()) == []
        for lent, model in models.items():
            assert (model == lent).all()
    cache.close()


def test_only_a_held_buffer_can_be_lent(caches):
    cache = caches()
    write(cache, 1)
    held = cache.newest()
    held.close()
    with pytest.raises(WeightError, match="not held any more"):
        held.lend()


def mapped(path):
    """Memory of this process that is of files under `path`: inode -> whether it was removed."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(str(path)):
            found[int(fields[4])] = fields[5].endswith(" (deleted)")
    return found


def test_a_buffer_that_was_replaced_is_free_when_its_readers_are_gone(caches, tmp_path):
    one, other, reader = caches(), caches(), caches()
    write(one, 1)
    write(one, 2)  # it has both mapped for writing
    with reader.newest() as held:
        lent = held.lend()
    del held
    inode = (home(tmp_path) / "1.data").stat().st_ino
    write(other, 3)
    write(other, 4)  # in a new file: the reader has the old one
    assert (home(tmp_path) / "1.data").stat().st_ino != inode
    assert mapped(tmp_path)[inode]
    assert newest_version(one) == 4  # it looks, and lets its own mapping go
    assert (lent == 2).all()
    del lent
    assert inode not in mapped(tmp_path)
    assert not any(mapped(tmp_path).values())


def test_no_more_than_two_buffers_stay_however_many_were_replaced(caches, tmp_path):
    leaders, models = [caches(), caches(), caches()], []
    for version in range(1, 13):
        with leaders[version % 3].lead() as lead:
            filling = lead.buffer(NBYTES, timeout=0)
            filling.begin()
            filling.data[:] = version
            filling.commit(version, b"")
        with leaders[0].newest() as held:
            models.append(torch.from_numpy(held.lend()))
    del held
    assert len(mapped(tmp_path)) >= 12  # a file for each model
    assert all((model == version).all() for version, model in enumerate(models, start=1))
    models.clear()
    assert [newest_version(cache) for cache in leaders] == [12] * 3
    assert len(mapped(tmp_path)) <= 2
    assert not any(mapped(tmp_path).values())


def test_another_size_makes_a_new_file_and_spares_old_arrays(caches):
    cache = caches()
    write(cache, 1)
    write(cache, 2)
    with cache.newest() as held:
        data = held.data
    for version, nbytes in [(3, 10), (4, 0), (5, 1 << 20)]:
        with cache.lead() as lead:
            assert lead.buffer(nbytes).version == 0
        write(cache, version, nbytes=nbytes)
        with cache.newest() as held:
            assert (held.version, held.data.size) == (version, nbytes)
    assert (data == 2).all()


def test_one_leads_at_a_time_among_caches_and_threads(caches):
    one, other = caches(), caches()
    with one.lead():
        assert one.lead() is None
        assert other.lead() is None
    with other.lead():
        assert one.lead() is None
    led, barrier = [], threading.Barrier(16)

    def run():
        cache = one if len(led) % 2 else other
        barrier.wait()
        led.append(cache.lead())
        barrier.wait()

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (lead,) = (lead for lead in led if lead is not None)
    lead.close()


def test_wait_ends_with_the_leadership_or_the_timeout(caches):
    leader, waiter = caches(), caches()
    assert waiter.wait(0) is True  # nobody leads
    lead = leader.lead()
    started = time.monotonic()
    assert waiter.wait(0) is False
    assert waiter.wait(-1) is False
    assert waiter.wait(0.05) is False
    assert 0.05 <= time.monotonic() - started < 4
    woken = []
    threads = [threading.Thread(target=lambda: woken.append(waiter.wait(1e12))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert waiter.wait(0.05) is False
    lead.close()
    for thread in threads:
        thread.join(5)
    assert woken == [True] * 8
    assert waiter.lead() is not None


def test_a_waiter_wakes_even_if_it_looks_while_leaders_change(caches, tmp_path, monkeypatch):
    leader, waiter = caches(), caches()
    lead, opened = leader.lead(), os.open

    def slowly(path, flags, *mode):
        descriptor = opened(path, flags, *mode)
        if Path(path).name == "leader" and flags & os.O_RDWR:
            monkeypatch.setattr(os, "open", opened)
            lead.close()
            leader.lead().close()  # another lock is at the path, and nobody has it
        return descriptor

    monkeypatch.setattr(os, "open", slowly)
    started = time.monotonic()
    assert waiter.wait(5)
    assert time.monotonic() - started < 4


def watchers(path):
    """How many descriptors of this process are at `path`; none of them in passing."""
    with locks._process.guard:
        descriptors = list(Path("/proc/self/fd").iterdir())
        return sum(at.exists() and at.samefile(path) for at in descriptors)


def test_a_waiter_wakes_even_if_the_next_leads_at_once(caches, tmp_path):
    leader, waiters = caches(), [caches() for _ in range(6)]
    for _ in range(20):
        lead, woken = leader.lead(), []
        waiting = threading.Barrier(7)

        def wait(waiter, woken=woken, waiting=waiting):
            waiting.wait()
            woken.append(waiter.wait(5))

        threads = [threading.Thread(target=wait, args=(waiter,)) for waiter in waiters]
        for thread in threads:
            thread.start()
        waiting.wait()
        while watchers(home(tmp_path) / "leader") < 7:  # the leader, and who waits for it
            threading.Event().wait(0.001)
        lead.close()
        following = leader.lead()
        for thread in threads:
            thread.join(4)
        assert woken == [True] * 6
        following.close()


def test_makers_in_threads_see_whole_versions_only(caches):
    last, threads, problems = 40, [], []

    def run():
        cache = caches()
        seen = 0
        try:
            while seen < last:
                held = cache.newest()
                if held is not None:
                    with held:
                        values = np.unique(held.data)
                        if list(values) != [held.version] or held.version < seen:
                            problems.append((held.version, seen, values))
                        seen = held.version
                lead = cache.lead()
                if lead is None:
                    cache.wait(5)
                    continue
                with lead:
                    held = cache.newest()
                    version = 0
                    if held is not None:
                        with held:
                            version = held.version
                    filling = lead.buffer(NBYTES, timeout=5)
                    if filling.version not in (0, version - 1):
                        problems.append((filling.version, version))
                    filling.begin()
                    filling.data[:] = version + 1
                    filling.commit(version + 1, b"")
        except Exception as error:  # noqa: BLE001  shown by the assertion
            problems.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write(b"\xff"),
        lambda file: file.seek(8) and file.write(b"\x09"),
        lambda file: file.write(Header(9, 1 << 60).packed()),
        lambda file: file.write(Header(1 << 60, NBYTES).packed()),
        lambda file: file.write(Header(9, NBYTES, 1 << 62).packed()),
        lambda file: file.write(Header(9, NBYTES, 4, 1).packed()),
        lambda file: file.write(Header(9, (1 << 64) - 1).packed()),
        lambda file: file.write(bytes(HEADER_BYTES)),
        lambda file: file.truncate(HEADER_BYTES - 1),
        lambda file: file.truncate(PAGE + NBYTES - 1),
        lambda file: file.truncate(0),
    ],
)
def test_a_damaged_buffer_is_not_seen_and_can_be_written_again(caches, tmp_path, damage):
    cache = caches()
    write(cache, 1)
    write(cache, 2)
    with (home(tmp_path) / "1.data").open("r+b") as file:
        damage(file)
    assert newest_version(caches()) == 1
    cache.close()
    cache = caches()
    for version in (10, 11, 12):
        write(cache, version)
        assert newest_version(cache) == version


def test_a_version_can_be_forgotten(caches):
    cache, reader = caches(), caches()
    write(cache, 100)
    write(cache, 101)
    held = reader.newest()
    with cache.lead() as lead:
        lead.forget(101, timeout=0)  # who reads it keeps it
        assert newest_version(reader) == 100
        lead.forget(100)
        lead.forget(100)
    assert reader.newest() is None
    write(cache, 1)
    write(cache, 2)
    write(cache, 3)
    assert newest_version(reader) == 3
    assert (held.data == 101).all()


def test_closed_leaders_and_buffers_cannot_be_used(caches):
    cache = caches()
    with cache.lead() as lead:
        filling = lead.buffer(NBYTES)
        with pytest.raises(ConfigError, match="begin"):
            filling.commit(1, b"")
        filling.begin()
        for version in (0, -1, 1.5, True, 1 << 60):
            with pytest.raises(ConfigError, match="version="):
                filling.commit(version, b"")
        filling.commit(1, b"")
        for use in (filling.begin, lambda: filling.commit(2, b""), lambda: filling.data):
            with pytest.raises(WeightError, match="not held"):
                use()
        with pytest.raises(ConfigError, match="nbytes="):
            lead.buffer(-1)
        second = lead.buffer(NBYTES)
        second.begin()
    with pytest.raises(WeightError, match="not held"):
        second.commit(2, b"")
    for use in (lambda: lead.buffer(NBYTES), lambda: lead.forget(1)):
        with pytest.raises(WeightError, match="does not lead any more"):
            use()
    cache.close()
    cache.close()
    for use in (cache.newest, cache.lead, lambda: cache.wait(0)):
        with pytest.raises(ConfigError, match="closed"):
            use()


def test_the_last_process_to_leave_deletes_the_files(caches, tmp_path):
    one, other, dropped = caches(), caches(), HostCache("weights", directory=tmp_path / "shm")
    write(one, 1)
    assert newest_version(other) == 1
    assert newest_version(dropped) == 1
    held = other.newest()
    one.close()
    assert newest_version(other) == 1
    other.close()
    assert newest_version(dropped) == 1
    del dropped
    gc.collect()
    assert list((tmp_path / "shm").iterdir()) == []
    assert (held.data == 1).all()
    held.close()
    write(caches(), 5)


def test_joining_and_leaving_at_once_never_parts_the_users(caches, tmp_path):
    """A commit is seen by who joined before it and stays: nobody writes into a removed home."""
    problems = []

    def run():
        try:
            for _ in range(40):
                cache = HostCache("weights", directory=tmp_path / "shm")
                lead = cache.lead()
                if lead is not None:
                    with lead:
                        filling = lead.buffer(100, timeout=5)
                        version = max(newest_version(cache) or 0, filling.version) + 1
                        filling.begin()
                        filling.data[:] = version
                        filling.commit(version, b"")
                        if newest_version(cache) != version:
                            problems.append("its own commit is not seen")
                cache.close()
        except Exception as error:  # noqa: BLE001  shown by the assertion
            problems.append(repr(error))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert list((tmp_path / "shm").iterdir()) == []


def test_unused_directories_are_deleted_after_an_hour(caches, tmp_path):
    directory = tmp_path / "shm"
    used, left, fresh = caches("used"), caches("left"), caches("fresh")
    for cache in (used, left, fresh):
        write(cache, 1)
    homes = {
        cache: Path(repr(cache)[len("<redrb.HostCache ") : -1]) for cache in (used, left, fresh)
    }
    for cache in (left, fresh):
        cache._joined.directory._users.release()  # as if it was killed
    for cache in (used, left):
        os.utime(homes[cache] / "users", (1, 1))
    (directory / "gone-1").mkdir()
    (directory / "gone-1" / "0.data").write_bytes(b"of one that was killed while it removed")
    (directory / "mine.txt").write_text("not ours")
    empty = directory / ("0" * 32)
    empty.mkdir()
    os.utime(empty, (1, 1))
    caches("another").newest()
    assert not homes[left].exists()
    assert not (directory / "gone-1").exists()
    assert not empty.exists()
    assert (directory / "mine.txt").exists()
    assert newest_version(used) == 1
    assert newest_version(caches("fresh")) == 1


def test_files_that_were_removed_from_outside_are_made_again(caches, tmp_path):
    cache = caches()
    write(cache, 1)
    for path in home(tmp_path).iterdir():
        path.unlink()
    home(tmp_path).rmdir()
    assert cache.newest() is None
    write(cache, 2)
    assert newest_version(cache) == 2


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_may_write_to_is_refused(caches, tmp_path, mode):
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm").chmod(mode)
    with pytest.raises(ConfigError, match="that only user"):
        caches().lead()
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_directory_that_is_a_link_a_file_or_anothers_is_refused(caches, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "shm").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="that only user"):
        caches().newest()
    (tmp_path / "shm").unlink()
    (tmp_path / "shm").write_text("")
    with pytest.raises(ConfigError, match="that only user"):
        caches().newest()
    (tmp_path / "shm").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="user 12345"):
        caches().newest()


def test_the_directory_is_in_shared_memory_and_private(monkeypatch, tmp_path):
    assert str(host_cache._SHARED_MEMORY) == "/dev/shm"
    monkeypatch.setattr(host_cache, "_SHARED_MEMORY", tmp_path)
    cache = HostCache("weights")
    cache.newest()
    directory = tmp_path / f"redrb-{os.geteuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    cache.close()
    with pytest.raises(WeightError, match="host_cache out"):
        HostCache("weights", directory=tmp_path / "no" / "where").newest()


def test_too_little_room_is_reported_and_no_file_stays(caches, tmp_path, monkeypatch):
    cache = caches()
    write(cache, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with cache.lead() as lead:
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(
                WeightError, match=r"1,007,616 bytes does not fit .*--shm-size.* host_cache out"
            ):
                lead.buffer(1_000_000, timeout=0)
            assert sorted(path.name for path in home(tmp_path).glob("*.data")) == ["0.data"]
        filling = lead.buffer(NBYTES, timeout=0)  # no lock stays either
        filling.begin()
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(WeightError, match="--shm-size"):
                filling.commit(2, b"meta")
    assert newest_version(cache) == 1


def test_room_that_is_not_there_is_found_out_before_it_is_written(tmp_path):
    cache = HostCache("weights", directory=Path("/dev/shm") / tmp_path.name)
    try:
        with cache.lead() as lead:
            with pytest.raises(WeightError, match="--shm-size"):
                lead.buffer(1 << 50)
            assert lead.buffer(10).version == 0
    finally:
        cache.close()
        (Path("/dev/shm") / tmp_path.name).rmdir()


def test_no_descriptor_stays_open(caches, tmp_path):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    cache = caches()
    write(cache, 1)
    cache.close()
    gc.collect()
    before = count()
    for version in range(1, 20):
        cache = HostCache("weights", directory=tmp_path / "shm")
        write(cache, version)
        newest_version(cache)
        cache.lead().close()
        cache.wait(0)
        cache.close()
    del cache
    gc.collect()
    assert count() == before
