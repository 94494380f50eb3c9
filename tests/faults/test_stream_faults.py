"""Real processes that are killed, stopped and restarted: what was put is trained."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import redrb
from redrb import ExperienceStream
from tests import warm
from tests.audit import audit
from tests.clusters import RedisCluster
from tests.conftest import REAL
from tests.samples import numbered, numbers

ROOT = Path(__file__).parents[2]
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class Worker:
    """A worker process, and what it has said."""

    def __init__(self, *arguments: str) -> None:
        self.process = warm.Popen(
            [sys.executable, "-m", "tests.faults.stream_workers", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: list[tuple[str, list[int]]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            word, *numbers = line.split()
            with self._changed:
                self.said.append((word, [int(number) for number in numbers]))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def numbers(self, word: str) -> list[int]:
        """Return all numbers that were said with `word`."""
        return [number for said, numbers in list(self.said) if said == word for number in numbers]

    def wait_for(self, word: str, at_least: int = 0, timeout: float = 60) -> list[int]:
        """Wait until `at_least` numbers were said with `word`, and return them."""

        def heard() -> bool:
            words = [said for said, _ in self.said]
            return word in words and len(self.numbers(word)) >= at_least

        with self._changed:
            assert self._changed.wait_for(heard, timeout), (word, at_least, self.said[-3:])
        return self.numbers(word)

    def tell(self) -> None:
        """Send a line."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """End the process with SIGKILL, and hear what it said until then."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """End the process, and hear what it said until then."""
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self.process.stdout.close()


@pytest.fixture
def start():
    """Start a worker; it ends with the test."""
    started: list[Worker] = []

    def start_it(*arguments):
        started.append(Worker(*map(str, arguments)))
        return started[-1]

    yield start_it
    for worker in started:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGCONT)
            worker.kill()
        elif worker._reader.is_alive() or not worker.process.stdout.closed:
            worker.close()


def until(condition: Callable[[], bool], timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_goes_on_when_a_maker_a_trainer_and_the_server_are_killed(own_server, start):
    server = own_server(*DURABLE)
    count = 1200
    makers = [start("maker", server.url, first, count) for first in (0, count)]
    trainers = [start("trainer", server.url) for _ in range(2)]
    for worker in (*makers, *trainers):
        worker.wait_for("ready")

    makers[0].wait_for("put", 200)
    makers[0].kill()
    trainers[0].wait_for("took", 100)
    trainers[0].kill()
    makers[1].wait_for("put", 400)
    server.kill()
    server.start()
    makers.append(start("maker", server.url, 2 * count, 200))  # a new one instead of the killed one
    trainers.append(start("trainer", server.url))

    makers[1].wait_for("put", count)
    makers[2].wait_for("put", 200)
    put = {number for maker in makers for number in maker.numbers("put")}

    def trained():
        return {number for trainer in trainers for number in trainer.numbers("acked")}

    with redrb.connect(server.url) as client, ExperienceStream(client, "math") as stream:
        until(lambda: len(stream) == 0 and stream.stats().ledger.leased == 0)
        ledger = stream.stats().ledger
        audit(stream)
    for trainer in trainers[1:]:
        trainer.close()
    # a trainer that was killed between its ack and its word cannot tell
    unheard = put - trained()
    assert unheard <= set(trainers[0].numbers("took")[-8:]), "acknowledged puts were never trained"
    assert ledger.balanced
    assert ledger.acked == ledger.put
    assert ledger.dead == 0
    acked = [number for trainer in trainers for number in trainer.numbers("acked")]
    assert len(acked) == len(set(acked)), "a group was acknowledged twice"
    # of the killed maker's last put it is not known whether it landed
    assert 0 <= ledger.put - len(put) <= 4


@pytest.fixture(params=list(REAL))
def cluster(request):
    cluster = RedisCluster(REAL[request.param])
    yield cluster
    cluster.close()


def test_a_trainer_that_was_stopped_past_its_lease_has_lost_it(own_server, start):
    server = own_server()
    with redrb.connect(server.url) as client, ExperienceStream(client, "math", limit=64) as stream:
        stopped = start("once", server.url)
        stopped.wait_for("ready")
        ids = stream.put_many([[numbered(n)] for n in range(4)])
        stopped.wait_for("took", 4)
        stopped.process.send_signal(signal.SIGSTOP)
        with stream.take(4, timeout=10) as lease:
            assert numbers(lease) == [0, 1, 2, 3]
            assert stream.stats().taken_over == 4
        stopped.process.send_signal(signal.SIGCONT)
        stopped.tell()
        assert stopped.wait_for("lost") == list(ids)
        ledger = stream.stats().ledger
        assert (ledger.acked, ledger.leased, ledger.waiting) == (4, 0, 0)
        audit(stream)


def test_a_trainer_that_was_stopped_shortly_keeps_its_lease(own_server, start):
    server = own_server()
    with redrb.connect(server.url) as client, ExperienceStream(client, "math", limit=64) as stream:
        stopped = start("once", server.url)
        stopped.wait_for("ready")
        stream.put_many([[numbered(n)] for n in range(4)])
        stopped.wait_for("took", 4)
        stopped.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            stream.take(4, timeout=0.2)
        stopped.process.send_signal(signal.SIGCONT)
        stopped.tell()
        stopped.wait_for("acked")
        assert stream.stats().ledger.acked == 4


def test_waiting_puts_and_takes_outlive_a_restart_of_the_server(own_server):
    server = own_server("--appendonly", "yes", "--appendfsync", "always")
    with redrb.connect(server.url, retry_s=20) as client:
        stream = ExperienceStream(client, "math", limit=4)
        got: list[int] = []

        def take():
            with stream.take(3, timeout=30) as lease:
                got.extend(numbers(lease))

        thread = threading.Thread(target=take)
        thread.start()
        until(lambda: stream.stats().consumers_waiting == 1)
        stream.put(numbered(1))
        server.kill()
        putter = threading.Thread(target=stream.put_many, args=([[numbered(2)], [numbered(3)]],))
        putter.start()
        server.start()
        putter.join(15)
        thread.join(15)
        assert got == [1, 2, 3]
        audit(stream)
        stream.close()


def test_a_lease_outlives_a_restart_of_the_server(own_server):
    server = own_server("--appendonly", "yes", "--appendfsync", "always")
    with redrb.connect(server.url, retry_s=20) as client:
        stream = ExperienceStream(client, "math")
        stream.put_many([[numbered(n)] for n in range(3)])
        lease = stream.take(2, timeout=0)
        server.kill()
        server.start()
        lease.ack()
        (seq,) = stream.put(numbered(3))  # the server has forgotten the script
        assert seq > 3
        assert numbers(stream.take(2, timeout=0)) == [2, 3]
        audit(stream)
        stream.close()


def test_a_sharded_stream_loses_nothing_when_all_its_workers_are_killed(cluster, start):
    task = f"{cluster.url}#6"
    makers = [start("maker", task, first, 5000) for first in (0, 5000)]
    trainer = start("trainer", task)
    for worker in (*makers, trainer):
        worker.wait_for("ready", timeout=60)
    makers[0].wait_for("put", 100)
    makers[0].kill()
    trainer.wait_for("acked", 150)
    trainer.kill()
    with (
        redrb.connect(cluster.url) as client,
        redrb.ShardedStream(client, "math", shards=6, lease_ms=1000) as stream,
    ):
        shards = stream.shards.values()
        until(lambda: all(shard.stats().producers_waiting for shard in shards))
        # the place of the maker that was killed ends by its time
        until(lambda: stream.stats().producers_waiting == 1)
        makers[1].kill()  # while it waits for room in all shards
        put = {number for maker in makers for number in maker.numbers("put")}
        acked = trainer.numbers("acked")
        while left := stream.stats().ledger.waiting:
            with stream.take(left, timeout=20) as lease:
                acked += numbers(lease)
            until(lambda: stream.stats().ledger.leased == 0)
        ledger = stream.stats().ledger
        for shard in stream.shards.values():
            audit(shard)
    assert ledger == redrb.Ledger(put=ledger.put, acked=ledger.put)
    # a trainer that was killed between its ack and its word cannot tell
    last_batch = set(trainer.numbers("took")[-8:])
    assert put - set(acked) <= last_batch, "acknowledged puts were never trained"
    assert len(acked) == len(set(acked)), "a group was acknowledged twice"
