"""Ranks in real processes with DistributedDataParallel: one is killed, and the job starts again."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

import redrb
from tests.audit import audit
from tests.integration.ranks_trainer import COUNT, WORLD, main
from tests.samples import numbered
from tests.servers import programs

STEPS = 5

Start = Callable[[str, Path], "list[Rank]"]


class Rank:
    """A process that is one rank; it does only the steps that the test asks for."""

    def __init__(self, context: Any, *arguments: Any) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=main, args=(other, *arguments))
        self.process.start()
        other.close()

    def next(self, event: str) -> dict[str, Any]:
        """Return the next thing that it says."""
        assert self.pipe.poll(40), f"it does not say {event}"
        said: dict[str, Any] = self.pipe.recv()
        assert said["event"] == event, said
        return said

    def go(self) -> None:
        self.pipe.send("go")

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()
        self.process.close()
        self.pipe.close()


@pytest.fixture
def start(real_url: str, tmp_path: Path) -> Iterator[Start]:
    """Start both ranks, as forks of a process that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([main.__module__])
    started: list[Rank] = []

    def begin(namespace: str, home: Path) -> list[Rank]:
        home.mkdir(exist_ok=True)
        meeting = tmp_path / uuid.uuid4().hex
        ranks = [
            Rank(context, real_url, namespace, rank, STEPS, home, meeting) for rank in range(WORLD)
        ]
        started.extend(ranks)
        return ranks

    yield begin
    for rank in started:
        rank.close()
    forkserver._forkserver._stop()


def flat(lists: Iterable[list[int]]) -> list[int]:
    return sorted(chain.from_iterable(lists))


def take(ranks: list[Rank], step: int) -> list[list[int]]:
    for rank in ranks:
        assert rank.next("ready")["step"] == step
        rank.go()
    return [rank.next("took")["numbers"] for rank in ranks]


def train(ranks: list[Rank], first: int, last: int, trained: dict[int, list[int]]) -> None:
    """Let ranks take and train steps, and note what they have trained in each."""
    for step in range(first, last):
        taken = take(ranks, step)
        for rank in ranks:
            rank.go()
        assert [rank.next("trained")["numbers"] for rank in ranks] == taken
        assert step not in trained
        trained[step] = flat(taken)


@pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)
@pytest.mark.slow
def test_a_killed_rank_ends_the_job_at_its_step_and_it_goes_on_from_there(
    real_url: str, start: Start, tmp_path: Path
) -> None:
    client = redrb.connect(real_url)
    streams = {name: uuid.uuid4().hex for name in ("whole", "broken")}
    for namespace in streams.values():
        with redrb.ExperienceStream(client, "math", namespace=namespace) as stream:
            stream.put_many([[numbered(n)] for n in range(STEPS * COUNT)])

    # without interruption
    whole: dict[int, list[int]] = {}
    ranks = start(streams["whole"], tmp_path / "whole")
    train(ranks, 0, STEPS, whole)
    expected = [rank.next("ended")["parameters"] for rank in ranks]
    assert expected[0] == expected[1]

    # a rank is killed before it asks for step 2: the other one's all-reduce fails
    broken: dict[int, list[int]] = {}
    ranks = start(streams["broken"], tmp_path / "broken")
    train(ranks, 0, 2, broken)
    for rank in ranks:
        rank.next("ready")
    ranks[1].kill()
    ranks[0].go()
    ranks[0].next("took")
    ranks[0].go()
    failed = ranks[0].next("failed")
    assert (failed["kind"], failed["step"]) == ("RuntimeError", 2), failed
    ranks[0].process.join(20)
    assert ranks[0].process.exitcode == 0

    # both start again; one is killed while it trains step 3, so the other one's all-reduce fails
    ranks = start(streams["broken"], tmp_path / "broken")
    train(ranks, 2, 3, broken)
    parts = take(ranks, 3)
    ranks[1].kill()
    ranks[0].go()
    failed = ranks[0].next("failed")
    assert (failed["kind"], failed["step"]) == ("RuntimeError", 3), failed
    ranks[0].process.join(20)
    assert ranks[0].process.exitcode == 0

    # both start again with the same parts, and end where the others did
    ranks = start(streams["broken"], tmp_path / "broken")
    assert take(ranks, 3) == parts
    for rank in ranks:
        rank.go()
    assert [rank.next("trained")["numbers"] for rank in ranks] == parts
    broken[3] = flat(parts)
    train(ranks, 4, STEPS, broken)
    assert [rank.next("ended")["parameters"] for rank in ranks] == expected
    assert broken == whole
    assert flat(broken.values()) == list(range(STEPS * COUNT))
    with redrb.ExperienceStream(client, "math", namespace=streams["broken"]) as stream:
        audit(stream)
        ledger = stream.stats().ledger
        assert (ledger.acked, ledger.leased, ledger.waiting) == (STEPS * COUNT, 0, 0)
    client.close()
