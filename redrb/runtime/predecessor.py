"""Hand-over between two trainers of one name: groups of the dead one are requeued at once."""

from __future__ import annotations

import logging

from redrb.connection import Client
from redrb.keys import consumer_key
from redrb.stream import ExperienceStream

_log = logging.getLogger("redrb")


def replace_predecessor(
    client: Client, namespace: str, trainer: str, stream: ExperienceStream
) -> None:
    """Requeue at once all groups that an earlier trainer of this name leases.

    Trainers that share a task as ranks need no such call: `take` requeues for them.

    Args:
        client: Connection to Redis.
        namespace: Namespace of the trainer.
        trainer: Name of the trainer.
        stream: The new trainer's stream, whose consumer is noted for the trainer after it.
    """
    key = consumer_key(namespace, trainer)
    client = client.at(key)
    noted = client.execute("GET", key)
    task, _, consumer = (noted or b"").decode(errors="replace").partition(" ")
    if consumer and task == stream.task and consumer != stream.consumer:
        requeued = stream.dismiss(consumer)
        if requeued:
            _log.warning(
                "trainer %r: %d groups of the trainer before it were requeued", trainer, requeued
            )
    client.execute("SET", key, f"{stream.task} {stream.consumer}")
