"""What a worker of a run held when it died returns at once: the run has seen it end."""

from __future__ import annotations

import logging

from redrb.connection import Client
from redrb.connection.deadline import Deadline
from redrb.errors import RedrbError
from redrb.processes import this_process
from redrb.stream.admission.calls import GiveBack
from redrb.stream.take.calls import Leave
from redrb.stream.task.store import TaskStore

_LONGEST_S = 5.0
"""Longest time on Redis: after that the heartbeats of others find that the worker has died."""

_log = logging.getLogger("redrb")


def return_held(client: Client, task: str, namespace: str, pid: int) -> None:
    """Let the leases and rights of a process of this machine, which has ended, go to others now.

    While Redis is away they go to others when their heartbeat is missed.
    """
    process, store = this_process(pid), TaskStore.of(client, namespace, task)
    prefix = store.keys.prefix

    def named(key: str) -> set[str]:
        members = store.client.execute("ZRANGE", key, 0, -1)
        names = (member.decode(errors="replace").partition("/")[0] for member in members)
        return {name for name in names if name.startswith(process)}

    try:
        with Deadline(at_most=_LONGEST_S, repeat_s=0.0):
            for group in store.client.execute("SMEMBERS", f"{prefix}groups"):
                name = group.decode(errors="replace")
                for consumer in named(f"{prefix}consumers:{name}"):
                    list(store.pages(Leave(name, consumer, died=True)))
            for maker in named(f"{prefix}makers") | named(f"{prefix}queue:#admission"):
                list(store.pages(GiveBack(holder=maker, died=True)))
    except RedrbError as error:
        _log.debug("what process %d held in task %r returns later: %s", pid, task, error)
