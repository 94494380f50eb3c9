"""Makers and trainers that a test stops, kills, or lets fail."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

import redrb
from redrb import ExperienceStream
from redrb.stream import worker
from tests.samples import numbered


def work(
    role: str, url: str, namespace: str, task: str, options: dict[str, Any], orders: Connection
) -> None:
    """Work on a task until the process is killed.

    Args:
        role: "maker": puts as many groups as each order says; "old maker": the same, with an old
            version of redrb; "trainer": holds the first group; "failing": raises an error on each.
        url: Where Redis is.
        namespace: Namespace of the task.
        task: The task.
        options: Of the stream.
        orders: Connection from which orders come.
    """
    # a program of a user's own, also where pytest runs as `python -c`
    vars(sys.modules["__main__"]).update(__spec__=None)
    sys.argv[:1] = ["worker.py"]
    if role == "old maker":
        worker.__version__ = "0.0.1"
    with (
        redrb.connect(url) as client,
        ExperienceStream(client, task, namespace=namespace, **options) as stream,
    ):
        if role == "trainer":
            lease = stream.take(1)
            orders.recv()
            lease.release()
        elif role == "failing":
            while True:
                _fail(stream)
        while True:
            for number in range(orders.recv()):
                stream.put(numbered(number))


def _fail(stream: ExperienceStream) -> None:
    try:
        with stream.take(1):
            raise ValueError("the loss is nan")
    except ValueError:
        return
