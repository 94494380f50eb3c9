"""The host cache when processes that share it are killed or forked."""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver

import numpy as np
import pytest

from redrb.weights.host.cache import HostCache

NBYTES = 1 << 20
PATIENCE_S = 20.0


class Worker:
    """What a maker's process does with the cache, a command at a time."""

    def __init__(self, directory):
        self.cache = HostCache("weights", directory=directory)
        self.lead = self.filling = self.held = None
        self.lent = []
        self.problems = directory.parent / "problems"

    def do_newest(self):
        held = self.cache.newest()
        if held is None:
            return None
        with held:
            return held.version, held.meta, np.unique(held.data).tolist()

    def do_lead(self):
        self.lead = self.cache.lead()
        return self.lead is not None

    def do_end(self):
        self.lead.close()

    def do_buffer(self, timeout=5.0):
        self.filling = self.lead.buffer(NBYTES, timeout=timeout)
        return self.filling.version

    def do_begin(self):
        self.filling.begin()

    def do_write(self, value, part=1.0):
        self.filling.data[: int(NBYTES * part)] = value % 256

    def do_commit(self, version):
        self.filling.commit(version, b"meta %d" % version)

    def do_publish(self, version, timeout=5.0):
        assert self.do_lead()
        self.do_buffer(timeout)
        self.do_begin()
        self.do_write(version)
        self.do_commit(version)
        self.do_end()

    def do_hold(self):
        self.held = self.cache.newest()
        return self.held.version

    def do_held(self):
        return np.unique(self.held.data).tolist()

    def do_lend(self):
        """Put a model into the newest version, as a subscriber does, and keep those before."""
        with self.cache.newest() as held:
            self.lent.append((held.version, held.lend()))
        return held.version

    def do_lent(self):
        """Return versions of models that are not as they were."""
        return [version for version, data in self.lent if not (data == version % 256).all()]

    def do_drop(self):
        self.lent.clear()

    def do_publish_and_die(self, version, calls):
        """Publish, and be killed after so many calls of the system."""
        left = [calls]

        def counted(call):
            def dying(*arguments, **options):
                result = call(*arguments, **options)
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return dying

        for name in ("open", "unlink", "mkfifo", "rename", "posix_fallocate", "pwrite"):
            setattr(os, name, counted(getattr(os, name)))
        fcntl.flock = counted(fcntl.flock)
        self.do_publish(version, timeout=0)

    def do_make(self, pause_s):
        """Follow and publish until killed, and look all the time at what was mapped."""
        random, newest = np.random.default_rng(), 0
        while True:
            held = self.cache.newest()
            if held is not None:
                with held:
                    self.lent.append((held.version, held.lend()))
                    if not newest <= held.version:
                        self.tell(f"version {held.version} after {newest}")
                    newest = held.version
            for version in self.do_lent():
                self.tell(f"version {version} has changed")
            if random.random() < 0.3:
                del self.lent[: random.integers(len(self.lent) + 1)]
            del self.lent[:-6]
            self.lead = self.cache.lead()
            if self.lead is None:
                self.cache.wait(pause_s)
                continue
            held = self.cache.newest()
            version = 0
            if held is not None:
                with held:
                    version = held.version
            self.do_buffer(timeout=0)
            self.do_begin()
            self.do_write(version + 1, 0.5)
            time.sleep(random.random() * pause_s)
            self.do_write(version + 1)
            self.do_commit(version + 1)
            self.do_end()

    def tell(self, problem):
        with self.problems.open("a") as file:
            file.write(f"{problem}\n")

    def do_fork_with_what_was_lent(self):
        """Fork a child that tells, when a file `look` is there, what it has of the parent's."""
        child = os.fork()
        if child == 0:
            look, seen = self.problems.with_name("look"), self.problems.with_name("seen")
            while not look.exists():
                time.sleep(0.005)
            seen.with_suffix(".part").write_text(str(self.do_lent()))
            seen.with_suffix(".part").rename(seen)
            os._exit(0)
        return child

    def do_wait(self, timeout):
        done = self.cache.wait(timeout)
        return done, time.monotonic()

    def do_wait_and_lead(self, timeout):
        assert self.cache.wait(timeout)
        return self.do_lead()

    def do_fork(self):
        """Fork a child that stays, as a data loader's worker does; returns when it runs."""
        running, began = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(began, b".")
            signal.pause()
            os._exit(0)
        os.read(running, 1)
        return child

    def do_fork_and_exit(self):
        """Fork a child that uses the cache, lets go of all it inherited, and exits in order."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if self.held is not None:
                    self.held.close()
                if self.lead is not None:
                    self.lead.close()
                    assert self.cache.lead() is None
                self.cache.close()
                own = HostCache("weights", directory=self.cache._directory)
                assert own.newest() is not None
                own.close()
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def do_exit(self):
        sys.exit(0)


def serve(connection, directory):
    worker = Worker(directory)
    connection.send("ready")
    while True:
        name, arguments = connection.recv()
        connection.send(getattr(worker, f"do_{name}")(*arguments))


class Maker:
    """A process with a `Worker`, seen from the test."""

    def __init__(self, context, directory):
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, directory), daemon=True)
        self.process.start()
        theirs.close()

    def __getattr__(self, name):
        def call(*arguments):
            self.send(name, *arguments)
            return self.reply()

        return call

    def send(self, name, *arguments):
        self.connection.send((name, arguments))

    def reply(self):
        assert self.connection.poll(PATIENCE_S), "no reply"
        return self.connection.recv()

    def kill(self):
        self.process.kill()
        self.process.join(PATIENCE_S)

    def close(self):
        if not self.connection.closed:
            self.kill()
            self.process.close()
            self.connection.close()


@pytest.fixture(scope="module")
def context():
    # a fork server: what is imported is imported once, and nothing of this process is inherited
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "redrb.weights.host.cache"])
    yield context
    forkserver._forkserver._stop()


@pytest.fixture
def start(context, tmp_path):
    """Start makers that share a directory."""
    started = []

    def start(count=1):
        makers = [Maker(context, tmp_path / "shm") for _ in range(count)]
        started.extend(makers)
        assert [maker.reply() for maker in makers] == ["ready"] * count
        return makers if count > 1 else makers[0]

    yield start
    for maker in started:
        maker.close()


def whole(version):
    return version, b"meta %d" % version, [version % 256]


def test_a_version_that_one_process_wrote_is_mapped_by_others(start):
    one, *others = start(3)
    one.publish(1)
    assert [maker.newest() for maker in others] == [whole(1)] * 2
    others[0].publish(2)
    others[1].publish(3)
    assert one.newest() == whole(3)
    assert [maker.newest() for maker in others] == [whole(3)] * 2


@pytest.mark.parametrize(
    ("steps", "left", "seen"),
    [
        ([], 1, 2),
        ([("buffer",)], 1, 2),
        ([("buffer",), ("begin",)], 0, 2),
        ([("buffer",), ("begin",), ("write", 3, 0.5)], 0, 2),
        ([("buffer",), ("begin",), ("write", 3)], 0, 2),
        ([("buffer",), ("begin",), ("write", 3), ("commit", 3)], 2, 3),
    ],
    ids=["leading", "locked", "begun", "half written", "written", "committed"],
)
def test_a_leader_that_is_killed_is_followed_at_once(start, steps, left, seen):
    leader, next_one = start(2)
    leader.publish(1)
    leader.publish(2)
    assert leader.lead()
    for name, *arguments in steps:
        getattr(leader, name)(*arguments)
    assert next_one.newest() == whole(seen)
    assert next_one.lead() is False
    leader.kill()
    assert next_one.newest() == whole(seen)
    assert next_one.lead() is True
    assert next_one.buffer(0) == left
    next_one.end()
    next_one.publish(9)
    assert next_one.newest() == whole(9)


def test_the_first_version_of_a_killed_leader_is_not_seen(start):
    leader, reader = start(2)
    leader.lead()
    leader.buffer()
    leader.begin()
    leader.write(1)
    leader.kill()
    assert reader.newest() is None
    reader.publish(2)
    assert reader.newest() == whole(2)


def test_all_waiters_wake_when_the_leader_is_killed_and_one_leads(start):
    leader, *others = start(5)
    leader.publish(1)
    leader.lead()
    leader.buffer()
    leader.begin()
    for maker in others:
        maker.send("wait_and_lead", PATIENCE_S)
    assert not any(maker.connection.poll(0.05) for maker in others)
    leader.kill()
    leads = [maker.reply() for maker in others]
    assert sorted(leads) == [False, False, False, True]
    new = others[leads.index(True)]
    for maker in others:
        if maker is not new:
            maker.send("wait", PATIENCE_S)
    assert new.buffer() == 0
    new.begin()
    new.write(2)
    new.commit(2)
    new.end()
    ended = time.monotonic()
    for maker in others:
        if maker is not new:
            done, woken = maker.reply()
            assert done
            assert woken - ended < 5
            assert maker.newest() == whole(2)


def test_a_leader_that_stands_still_is_waited_for_no_longer_than_asked(start):
    leader, waiter = start(2)
    leader.lead()
    os.kill(leader.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    done, ended = waiter.wait(0.1)
    assert not done
    assert 0.1 <= ended - started < 5
    assert waiter.lead() is False


def test_a_killed_reader_holds_its_buffer_no_more(start):
    reader, leader = start(2)
    leader.publish(1)
    reader.hold()
    leader.publish(2)
    leader.lead()
    leader.send("buffer", PATIENCE_S)
    assert not leader.connection.poll(0.05)
    reader.kill()
    assert leader.reply() == 1


def test_readers_keep_held_buffers_when_a_leader_is_killed(start):
    leader, reader, third = start(3)
    leader.publish(1)
    assert reader.hold() == 1
    leader.lead()
    leader.buffer()
    leader.begin()
    leader.write(2)
    leader.kill()
    assert reader.held() == [1]
    third.publish(3)
    third.lead()
    assert third.buffer(0.05) == 0  # a new one: the old one is still held
    third.begin()
    third.write(4)
    assert reader.held() == [1]
    third.commit(4)
    assert reader.newest() == whole(4)
    assert reader.held() == [1]


def test_files_of_killed_processes_are_used_by_the_next(start, tmp_path):
    for maker in start(2):
        maker.publish(1) if maker.newest() is None else maker.hold()
        maker.kill()
    after = start()
    assert after.newest() == whole(1)
    after.publish(2)
    assert after.newest() == whole(2)
    after.send("exit")
    after.process.join(PATIENCE_S)
    assert after.process.exitcode == 0


def test_a_process_that_ends_in_order_takes_the_files_away_as_the_last(start, tmp_path):
    one, other = start(2)
    one.publish(1)
    assert other.newest() == whole(1)
    one.send("exit")
    one.process.join(PATIENCE_S)
    assert other.newest() == whole(1)
    other.send("exit")
    other.process.join(PATIENCE_S)
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_program_that_ends_in_order_takes_the_files_away(tmp_path):
    code = (
        "import sys, pathlib; from redrb.weights.host.cache import HostCache\n"
        "cache = HostCache('weights', directory=pathlib.Path(sys.argv[1]))\n"
        "with cache.lead() as lead: lead.buffer(100).begin()"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "shm"], check=True, timeout=60)
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_fork_keeps_nothing_of_a_killed_parent(start):
    parent, other = start(2)
    other.publish(1)
    parent.publish(2)
    parent.hold()
    parent.lead()
    parent.buffer()
    child = parent.fork()
    try:
        other.send("wait", PATIENCE_S)
        parent.kill()
        assert other.reply()[0]
        assert other.lead()
        assert other.buffer(0) == 1
        other.begin()
        other.write(3)
        other.commit(3)
        assert other.buffer(0) == 2
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_that_exits_lets_go_of_nothing_of_its_parent(start):
    parent, other = start(2)
    parent.publish(1)
    parent.hold()
    parent.publish(2)
    assert parent.lead()
    assert parent.fork_and_exit() == 0
    assert other.wait(0)[0] is False
    assert other.lead() is False
    parent.end()
    assert other.lead()
    assert other.buffer(0) == 0  # a new one: version 1 is still held
    other.begin()
    other.write(3)
    assert parent.held() == [1]
    assert other.newest() == whole(2)


@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "is killed"])
def test_a_fork_keeps_the_model_that_it_has_of_a_parent_that(start, tmp_path, killed):
    parent, other = start(2)
    parent.publish(1)
    parent.lend()
    parent.publish(2)
    parent.lend()
    child = parent.fork_with_what_was_lent()
    try:
        if killed:
            parent.kill()
        else:
            parent.drop()
        for version in range(3, 7):
            other.publish(version, 0)
        (tmp_path / "look").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "seen").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert (tmp_path / "seen").read_text() == "[]"
    finally:
        os.kill(child, signal.SIGKILL)
    assert other.newest() == whole(6)


def test_wherever_a_leader_is_killed_models_stay_and_another_leads(start):
    """After each of its calls of the system in turn, while both buffers are in use."""
    reader, version, killed = start(), 2, 0
    for first in (1, 2):
        reader.publish(first)
        reader.lend()
    for calls in itertools.count(1):
        leader = start()
        try:
            leader.publish_and_die(version + 1, calls)
        except EOFError:
            killed += 1
        else:
            break
        leader.close()
        seen = reader.newest()
        assert seen in (whole(version), whole(version + 1))
        version = seen[0] + 1
        reader.publish(version, 0)
        assert reader.newest() == whole(version)
        assert reader.lent() == []
        reader.lend()
    assert killed > 12
    assert reader.newest() == whole(version + 1)
    assert reader.lent() == []


def stress(start, tmp_path, seconds, makers):
    """Kill makers again and again; return the version that they came to."""
    dice = random.Random(0)
    running = [start() for _ in range(makers)]
    for maker in running:
        maker.send("make", 0.01)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(dice.random() * 0.03)
        killed = running.pop(dice.randrange(makers))
        assert killed.process.is_alive()
        killed.close()
        running.append(start())
        running[-1].send("make", 0.01)
    for maker in running:
        assert not maker.connection.poll(0)
        maker.close()
    assert not (tmp_path / "problems").exists(), (tmp_path / "problems").read_text()
    after = start()
    version = after.newest()[0]
    after.publish(version + 1, 0)
    assert after.newest() == whole(version + 1)
    (home,) = (tmp_path / "shm").iterdir()
    names = {path.name for path in home.iterdir()} - {"0.next", "1.next", "leader.next"}
    assert names == {"users", "leader", "0", "1", "0.data", "1.data"}
    return version


def test_models_stay_while_makers_are_killed_at_any_time(start, tmp_path):
    assert stress(start, tmp_path, 1.2, 3) > 10


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_models_stay_while_makers_are_killed_for_long(start, tmp_path):
    assert stress(start, tmp_path, 30, 6) > 200
