"""The host cache when processes that share it are killed or forked."""

import fcntl
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver

import pytest
import torch
from torch import nn

import redrb
from redrb.weights.host import locks
from redrb.weights.reading import catalogue, shared_copy
from tests.contract.test_weights_host_cache import inode

ELEMENTS = 300_000
PATIENCE_S = 30.0


class Model(nn.Module):
    """All elements of a version have the same value, that of its number."""

    def __init__(self, value=0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((ELEMENTS,), float(value)))

    def value(self):
        """Return the value of all elements, None if they differ."""
        return int(self.weight[0]) if (self.weight == self.weight[0]).all() else None


class Maker:
    """What a maker's process does, a command at a time."""

    def __init__(self, url, namespace, directory):
        shared_copy._SHARED_MEMORY = directory
        self.connect = lambda: redrb.connect(url, retry_s=10)
        self.namespace = namespace
        self.model, self.reader = Model(), self.subscriber()

    def subscriber(self):
        return redrb.WeightSubscriber(
            self.connect(), "actor", namespace=self.namespace, host_cache=True
        )

    def do_poll(self):
        self.reader.poll(self.model)
        return self.model.value()

    def do_value(self):
        return self.model.value()

    def do_write(self):
        self.model.weight.data.zero_()
        return self.model.value()

    def do_place(self):
        """Return the number of the file that the elements of the model are in."""
        return inode(self.model.weight, shared_copy._SHARED_MEMORY)

    def do_poll_and_die(self, calls):
        """Poll, and be killed after so many calls of the system."""
        left = [calls]

        def counted(call):
            def dying(*arguments, **options):
                result = call(*arguments, **options)
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return dying

        for name in ("open", "unlink", "mkfifo", "rename", "posix_fallocate", "close"):
            setattr(os, name, counted(getattr(os, name)))
        fcntl.flock = counted(fcntl.flock)
        return self.do_poll()

    def do_stop_in_mid_fetch(self, connection):
        fetch = catalogue.fetch

        def stopping(client, batch):
            fetch(client, batch)
            connection.send(fork_that_stays())
            threading.Event().wait()

        catalogue.fetch = stopping
        self.do_poll()

    def do_fork_with_the_model(self, directory):
        """Fork a child that writes the value of the model when the file `look` appears."""
        child = os.fork()
        if child == 0:
            while not (directory / "look").exists():
                threading.Event().wait(0.005)
            (directory / "part").write_text(str(self.model.value()))
            (directory / "part").rename(directory / "seen")
            signal.pause()
        return child

    def do_fork_that_polls(self):
        """Fork a child that follows the weights as well, and exits in order."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                own, model = self.subscriber(), Model()
                own.poll(model)
                code = 0 if model.value() == self.model.value() else 2
                del own, self.reader, self.model
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_that_stays():
    """Fork a child that stays, as a data loader's worker does; return when it runs."""
    running, began = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(began, b".")
        signal.pause()
    os.read(running, 1)
    return child


def serve(connection, *arguments):
    torch.set_num_threads(1)
    maker = Maker(*arguments)
    connection.send("ready")
    while (received := connection.recv()) is not None:
        name, values = received
        if name == "stop_in_mid_fetch":
            values = (connection,)
        connection.send(getattr(maker, f"do_{name}")(*values))


class Process:
    """A process with a `Maker`, seen from the test."""

    def __init__(self, context, *arguments):
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        assert self.reply() == "ready"

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

    def exit(self):
        """End in order."""
        self.connection.send(None)
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == 0

    def close(self):
        self.process.kill()
        self.process.join(PATIENCE_S)
        self.connection.close()


@pytest.fixture(scope="module")
def context():
    # a fork server: what is imported is imported once, and nothing of this process is inherited
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch", "redrb"])
    yield context
    forkserver._forkserver._stop()


@pytest.fixture
def start(context, real_url, namespace, tmp_path):
    """Start makers that share a directory."""
    started = []

    def start():
        started.append(Process(context, real_url, namespace, tmp_path))
        return started[-1]

    yield start
    for maker in started:
        maker.close()


@pytest.fixture
def publish(real_url, namespace):
    """Publish the next version: in full, and every third time as a delta."""
    with redrb.connect(real_url, retry_s=10) as client:
        publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, anchor_every=3)
        yield lambda value: publisher.publish(Model(value)).version


@pytest.fixture
def files(tmp_path):
    return lambda: sorted(path.suffix.partition("-")[0] for path in tmp_path.glob("*/*"))


def test_wherever_a_process_is_killed_models_stay_and_another_fetches(start, publish, files):
    """After each of its calls of the system in turn."""
    slow, value, killed = start(), 1, 0
    publish(value)
    assert slow.poll() == value
    other = start()
    for calls in itertools.count(1):
        before, value = value, value + 1
        publish(value)
        dying = start()
        try:
            assert dying.poll_and_die(calls) == value
        except EOFError:
            killed += 1
        else:
            break
        assert other.poll() == value
        assert slow.value() == before
        dying.close()
        if calls % 2:
            assert slow.poll() == value
        else:
            slow, other = other, slow
            assert other.poll() == value
    assert killed > 15
    assert len(files()) <= 3


def test_processes_share_memory_and_the_last_one_removes_it(start, publish, files):
    one, other = start(), start()
    for value in (1, 2, 3):
        publish(value)
        assert one.poll() == other.poll() == value
        assert one.place() == other.place()
        assert other.place() is not None
    assert one.write() == 0
    assert other.value() == 3
    one.exit()
    assert files()
    assert other.value() == 3
    other.exit()
    assert files() == []


PROGRAM = """
import pathlib, sys, torch, redrb
from redrb.weights.reading import catalogue, shared_copy

shared_copy._SHARED_MEMORY = pathlib.Path(sys.argv[1])
client = redrb.connect("fake://program")
redrb.WeightPublisher(client, "actor").publish(torch.nn.Linear(3, 4))
reader, model = redrb.WeightSubscriber(client, "actor", host_cache=True), torch.nn.Linear(3, 4)
reader.poll(model)
shared_copy.kept, shared_copy.suppress.kept = reader, model  # as late as can be
print(len(list(pathlib.Path(sys.argv[1]).glob("*/*"))))
"""


def test_a_program_that_ends_in_order_leaves_nothing_and_says_nothing(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.stderr) == ("1\n", "")
    assert list(tmp_path.glob("*/*")) == []


def test_versions_of_killed_processes_are_used_by_the_next(start, publish, files):
    one = start()
    publish(1)
    assert one.poll() == 1
    one.close()
    after = start()
    assert after.poll() == 1
    publish(2)
    assert after.poll() == 2
    after.exit()
    assert files() == []


def test_a_fork_keeps_nothing_of_a_parent_that_is_killed_in_mid_fetch(start, publish):
    parent, other = start(), start()
    publish(1)
    child = parent.stop_in_mid_fetch()
    try:
        other.send("poll")
        assert not other.connection.poll(0.1)
        parent.close()
        assert other.reply() == 1
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_that_exits_releases_nothing_of_its_parent(start, publish):
    parent, other = start(), start()
    publish(1)
    assert parent.poll() == 1
    assert parent.fork_that_polls() == 0
    for value in (2, 3, 4):
        publish(value)
        assert other.poll() == value
        assert parent.value() == 1


@pytest.mark.parametrize("ends", ["goes on", "exits", "is killed"])
def test_a_fork_keeps_the_model_that_it_has_of_a_parent_that(
    start, publish, ends, tmp_path_factory
):
    parent, other, directory = start(), start(), tmp_path_factory.mktemp("child")
    publish(1)
    assert parent.poll() == 1
    child = parent.fork_with_the_model(directory)
    try:
        if ends == "exits":
            parent.exit()
        elif ends == "is killed":
            parent.close()
        for value in (2, 3, 4):
            publish(value)
            assert other.poll() == value
            if ends == "goes on":
                assert parent.poll() == value
        (directory / "look").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not (directory / "seen").exists():
            assert time.monotonic() < deadline
            threading.Event().wait(0.005)
        assert (directory / "seen").read_text() == "1"
    finally:
        os.kill(child, signal.SIGKILL)


def test_models_stay_while_makers_are_killed_at_any_time(start, publish, files):
    dice, value = random.Random(0), 0
    makers, have = [start() for _ in range(3)], {}
    for _ in range(12):
        value += 1
        publish(value)
        asked = [maker for maker in makers if dice.random() < 0.8]
        for maker in asked:
            maker.send("poll")
        victim = makers[dice.randrange(3)]
        threading.Event().wait(dice.random() * 0.02)
        victim.close()
        have.pop(victim, None)
        for maker in asked:
            if maker is not victim:
                have[maker] = maker.reply()
                assert have[maker] == value
        for maker in makers:
            if maker is not victim and maker in have:
                assert maker.value() == have[maker]
        makers[makers.index(victim)] = start()
    assert start().poll() == value
    assert len([name for name in files() if name not in (".lock", ".part")]) <= 5


def test_a_process_locks_nothing_that_a_fork_of_it_locks(tmp_path):
    """A fork closes its copies, so it releases no lock of its parent."""
    lock = locks.acquire_fifo(tmp_path / "fifo")
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0 if locks.acquire_fifo(tmp_path / "fifo") is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert locks.acquire_fifo(tmp_path / "fifo") is None
    lock.release()
