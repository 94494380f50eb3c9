"""A pipeline of processes that die: `python -m tests.faults.stage_workers URL NAMESPACE`.

Each role has several processes, one after the other. The first ones kill themselves with SIGKILL at
a chosen moment of their work; each is replaced. All are forked, so that torch is imported once. The
trainer prints how many groups are acknowledged; the pipeline ends at end-of-file on its input.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import torch

import redrb
from redrb import BufferItem, ExperienceStream
from redrb.stream.take.lease import Lease
from redrb.train import Stage

LEASE_MS = 400
DEATHS = ["working", "stored", ""]
"""In the middle of its function; between the put and the acknowledgement; never."""

ROLES = ["rollouts", "scored", "ready", "trainer"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method of leases at whose second call the process dies."""
    calls = []

    def call(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            die()
        method(*arguments)

    return call


def open_task(client: redrb.Client, namespace: str, task: str) -> ExperienceStream:
    return ExperienceStream(
        client, task, namespace=namespace, lease_ms=LEASE_MS, max_deliveries=1000
    )


def work(role: str, death: str, url: str, namespace: str) -> None:
    """Be one process of a role."""
    if death == "stored":
        patched = dying(Lease._end_parts)
        Lease._end_parts = lambda *arguments: patched(*arguments)
    calls: list[int] = []

    def add_field(group: list[BufferItem]) -> list[BufferItem]:
        calls.append(1)
        if death == "working" and len(calls) == 3:
            die()
        for item in group:
            item.tensors[role] = torch.tensor(1.0)
        return group

    with redrb.connect(url) as client:
        if role == "trainer":
            train(open_task(client, namespace, "ready"), death)
            return
        source = ["prompts", *ROLES][ROLES.index(role)]
        Stage(
            open_task(client, namespace, source),
            open_task(client, namespace, role),
            add_field,
            batch=2,
        ).run()


def train(stream: ExperienceStream, death: str) -> None:
    for steps, lease in enumerate(iter(lambda: stream.take(2), None)):
        if death == "working" and steps == 1:
            die()
        lease.ack()
        print(stream.stats().ledger.acked, flush=True)


def keep_running(role: str, url: str, namespace: str) -> None:
    """Start the processes of a role, each when the one before has died."""
    for death in DEATHS:
        child = os.fork()
        if not child:
            try:
                work(role, death, url, namespace)
            finally:
                os._exit(1)
        os.waitpid(child, 0)


def main() -> None:
    url, namespace = sys.argv[1:]
    supervisors = []
    for role in ROLES:
        supervisor = os.fork()
        if not supervisor:
            os.setpgid(0, 0)
            keep_running(role, url, namespace)
            os._exit(0)
        supervisors.append(supervisor)
    sys.stdin.read()
    for supervisor in supervisors:
        os.killpg(supervisor, signal.SIGKILL)


if __name__ == "__main__":
    main()
