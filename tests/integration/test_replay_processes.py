"""Replay buffers of several processes over one namespace; run as a script it is one of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

import redrb
from redrb import ExperienceStream, Status
from redrb.compat.xtuner import ReplayBuffer
from tests import warm

TASKS = ("math", "code")
GROUPS = 30


@dataclass
class Call:
    name: str


@dataclass
class Rollout:
    rollout_id: int
    status: Status = Status.COMPLETED
    prompt_ids: list[int] = field(default_factory=lambda: [1])
    tokens: list[int] = field(default_factory=lambda: [1, 2])
    response_ids: list[int] = field(default_factory=lambda: [2])
    response_model_steps: list[int] = field(default_factory=list)
    seq_staleness: int = 0
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = [call if isinstance(call, Call) else Call(**call) for call in self.calls]


def rollout(number: int, **fields: Any) -> Rollout:
    return Rollout(number, calls=[Call(f"call {number}")], **fields)


async def make(buffer: ReplayBuffer, first: int) -> None:
    """Put GROUPS groups from `first` on, their model step as high as their number."""
    await asyncio.gather(
        *(
            buffer.put(
                [rollout(number), rollout(number)],
                TASKS[number % 2],
                model_step=number,
                current_train_step=number + 1,
            )
            for number in range(first, first + GROUPS)
        )
    )


async def consume(buffer: ReplayBuffer) -> None:
    """Print the groups that are got, until standard input has ended and no group is left."""
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    while True:
        last = ended.done()
        groups, consumed = await buffer.take_batch(dict.fromkeys(TASKS, 3))
        for taken in groups.values():
            for group in taken:
                assert len(group) == 2
                assert group[0].calls == [Call(f"call {group[0].rollout_id}")]
                print(group[0].rollout_id, flush=True)
        if last and not sum(consumed.values()):
            return
        await asyncio.sleep(0.005)


async def hold(buffer: ReplayBuffer) -> None:
    """Take a group and never get to hand it over."""
    take = ExperienceStream.take

    def held(self: ExperienceStream, *args: Any, **options: Any) -> Any:
        lease = take(self, *args, **options)
        print("holds", flush=True)
        time.sleep(600)
        return lease

    ExperienceStream.take = held
    await buffer.get(1, "math", "completed")


def start(url: str, namespace: str, role: str, *arguments: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, url, namespace, role, *map(str, arguments)]
    pipe = subprocess.PIPE
    return warm.Popen(command, stdin=pipe, stdout=pipe, text=True)


def said(process: subprocess.Popen[str]) -> list[int]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return [int(line) for line in out.split()]


@pytest.mark.slow
def test_makers_and_consumers_in_several_processes(real_url: str, namespace: str) -> None:
    processes = [start(real_url, namespace, "make", first * GROUPS) for first in range(3)]
    takers = [start(real_url, namespace, "consume") for _ in range(2)]
    for maker in processes:
        assert said(maker) == []
    got = [number for taker in takers for number in said(taker)]
    assert sorted(got) == list(range(3 * GROUPS))
    with redrb.connect(real_url) as client:
        assert len(ReplayBuffer(client, namespace=namespace, order="stalest")) == 0


def test_one_process_expires_what_another_put(real_url: str, namespace: str) -> None:
    assert said(start(real_url, namespace, "make", 0)) == []

    async def main() -> None:
        with redrb.connect(real_url) as client:
            async with ReplayBuffer(
                client, namespace=namespace, order="stalest", rollout_type=Rollout
            ) as buffer:
                assert len(buffer) == GROUPS
                expired = await buffer.refresh_staleness(
                    dict.fromkeys(TASKS, 10), current_train_step=31
                )
                assert expired == {"math": 11, "code": 10}  # model steps 0 to 20
                groups = await buffer.get(3, "math", Status.EXPIRED)
                assert [group[0].rollout_id for group in groups] == [0, 2, 4]
                for group in groups:
                    for rollout in group:
                        assert type(rollout) is Rollout
                        assert rollout.calls == [Call(f"call {rollout.rollout_id}")]
                        assert rollout.status is Status.EXPIRED
                        assert (rollout.tokens, rollout.response_ids) == ([1], [])
                        assert rollout.seq_staleness == 30 - rollout.rollout_id
                fresh = await buffer.get(3, "code", Status.COMPLETED)
                assert [group[0].rollout_id for group in fresh] == [21, 23, 25]
                assert [group[0].seq_staleness for group in fresh] == [9, 7, 5]

    asyncio.run(main())


def test_groups_of_a_killed_process_are_requeued(real_url: str, namespace: str) -> None:
    async def main() -> None:
        with redrb.connect(real_url) as client:
            async with ReplayBuffer(
                client,
                namespace=namespace,
                order="stalest",
                rollout_type=Rollout,
                lease_ms=500,
            ) as buffer:
                await buffer.put([rollout(1)], "math")
                holder = start(real_url, namespace, "hold")
                assert await asyncio.to_thread(holder.stdout.readline) == "holds\n"
                assert await buffer.get(1, "math", "completed") == []
                holder.kill()
                holder.communicate()
                until = time.monotonic() + 20
                groups: list[Any] = []
                while not groups and time.monotonic() < until:
                    groups = await buffer.get(1, "math", "completed")
                    await asyncio.sleep(0.05)
                assert groups == [[rollout(1)]]

    asyncio.run(main())


async def play(url: str, namespace: str, role: str, *arguments: str) -> None:
    with redrb.connect(url) as client:
        async with ReplayBuffer(
            client, namespace=namespace, order="stalest", rollout_type=Rollout, lease_ms=500
        ) as buffer:
            await {"make": make, "consume": consume, "hold": hold}[role](
                buffer, *map(int, arguments)
            )


if __name__ == "__main__":
    asyncio.run(play(*sys.argv[1:]))
