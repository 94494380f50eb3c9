"""After many makers and trainers came, worked and died, Redis holds as much as before."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass

import pytest
import torch

import redrb
from redrb import ExperienceStream, WeightPublisher, WeightSubscriber
from redrb.connection import Client
from redrb.errors import BatchTimeout
from redrb.stream.put.calls import AskRoom
from redrb.stream.take.calls import Take, TakeRequest
from redrb.weights.wire.calls import FindSteps
from tests.audit import audit
from tests.conftest import REAL
from tests.samples import numbered
from tests.scenes import forget_the_silent, pass_epochs, silence

LEASE_MS = 100
TTL_MS = 5
_NEVER = -1
_SIZES = {
    "string": "STRLEN", "list": "LLEN", "set": "SCARD", "zset": "ZCARD", "hash": "HLEN",
    "stream": "XLEN",
}  # fmt: skip

WORLDS = [
    pytest.param(60, 12, id="60 makers"),
    pytest.param(3000, 300, id="3000 makers", marks=pytest.mark.slow),
]


@dataclass
class Survivors:
    """A maker, a trainer, a publisher and a reader that outlive all others."""

    client: Client
    namespace: str

    def __post_init__(self) -> None:
        self.stream = self.open()
        self.publisher = WeightPublisher(self.client, "actor", namespace=self.namespace, keep=2)
        self.reader = WeightSubscriber(self.client, "actor", namespace=self.namespace)
        self.work()

    def open(self) -> ExperienceStream:
        """Open the task as a maker or a trainer does."""
        return ExperienceStream(
            self.client, "math", namespace=self.namespace, lease_ms=LEASE_MS, tags=["prompt"],
            weights="actor", order="priority", max_staleness=1000, max_deliveries=1000,
            limit=10_000,
        )  # fmt: skip

    def work(self) -> None:
        """Train everything that waits, and publish."""
        while len(self.stream):
            with self.stream.take(100, at_least=1, timeout=0):
                pass
        with pytest.raises(BatchTimeout):
            self.stream.take(1, timeout=0, where={"prompt": "none"})
        for _ in range(2):
            self.version = self.publisher.publish({"weight": torch.rand(64)}).version
        self.reader.fetch()

    def live_on(self) -> None:
        """Let deadlines pass, and do what the survivors do in the hours after."""
        time.sleep((LEASE_MS + TTL_MS) / 1000)
        beats = 0
        while beats < 100 and self.leftovers():
            self.stream._consumer.beat()
            beats += 1
        for name in self.client.execute("KEYS", f"redrb:{{{self.namespace}:*"):
            if self.client.execute("PTTL", name) > 0:
                self.client.execute("UNLINK", name)
        self.stream.put(numbered(0), policy_version=self.version, priority=1)
        self.work()
        pass_epochs(self.stream, 3)
        forget_the_silent(self.stream)

    def leftovers(self) -> int:
        """Return how many dead consumers still have a deadline."""
        prefix = self.stream._task.store.keys.prefix
        found: int = self.client.execute("ZCARD", f"{prefix}consumers:default")
        return found - 1

    def names(self) -> list[bytes]:
        """Return the names of the keys that do not expire."""
        found = self.client.execute("KEYS", f"redrb:{{{self.namespace}:*")
        return [name for name in found if self.client.execute("PTTL", name) == _NEVER]

    def keys(self) -> dict[str, int]:
        """Return the keys of the namespace, with their sizes: members, fields, entries or bytes."""
        found = {}
        for name in self.names():
            kind = self.client.execute("TYPE", name).decode()
            key = re.sub("chunk:[0-9]+", "chunk", name.decode().replace(self.namespace, ""))
            found[key] = self.client.execute(_SIZES[kind], name)
        stream = self.stream._task.store.keys.stream
        found["consumers"] = len(self.client.execute("XINFO", "CONSUMERS", stream, "default"))
        return found

    def nbytes(self) -> int:
        """Return the memory of the keys."""
        usage = [
            self.client.execute("MEMORY", "USAGE", name, "SAMPLES", 0) for name in self.names()
        ]
        return sum(usage)


def die_as_maker(all_of_them: Survivors, number: int) -> None:
    """Put, wait for room, and die."""
    stream = all_of_them.open()
    stream.put(
        numbered(number),
        tags={"prompt": uuid.uuid4().hex},
        policy_version=all_of_them.version,
        priority=1,
    )
    if number % 3 == 0:
        stream._task.store.call(AskRoom(uuid.uuid4().hex, TTL_MS, [100]))
    silence(stream)


def die_as_trainer(all_of_them: Survivors, number: int) -> None:
    """Lease groups, wait for more, fetch weights, and die."""
    stream = all_of_them.open()
    stream.take(1, timeout=0).ack()
    held = stream.take(1, timeout=0)
    consumer, query = stream._consumer, '{"tag":"prompt","values":["x"],"inverted":false}'
    for where in ("", query):
        slot = consumer.occupy()
        asked = TakeRequest(10_000, 10_000, where=where)
        take = Take(
            "default",
            consumer.name,
            slot.name,
            slot.token,
            asked,
            slot.waiter,
            TTL_MS,
            LEASE_MS,
            stream._task.description.revision,
        )
        stream._task.store.call(take)
    silence(stream)
    del held  # not before: a heartbeat would return what was dropped, and nobody take it over
    catalogue = WeightSubscriber(
        all_of_them.client, "actor", namespace=all_of_them.namespace
    )._catalogue
    find = FindSteps(uuid.uuid4().hex, 0, 0, 0, 0, TTL_MS)
    find.run(catalogue.client, [catalogue.keys.versions])
    time.sleep(2 * TTL_MS / 1000)  # until then, groups are reserved for its takes


@pytest.mark.parametrize(("makers", "trainers"), WORLDS)
def test_nothing_stays_of_makers_and_trainers_that_died(server_urls, namespace, makers, trainers):
    with redrb.connect(server_urls(next(iter(REAL)))) as client:
        survivors = Survivors(client, namespace)
        for number in range(10):  # as many of each as a run has at a time
            die_as_maker(survivors, number)
        die_as_trainer(survivors, 0)
        survivors.live_on()
        before, nbytes = survivors.keys(), survivors.nbytes()
        for number in range(makers):
            die_as_maker(survivors, number)
            if number % (makers // trainers) == makers // trainers - 1:
                die_as_trainer(survivors, number)
        survivors.live_on()
        assert survivors.keys() == before
        assert survivors.nbytes() <= nbytes * 1.2
        audit(survivors.stream)
        survivors.stream.close()


def test_a_deleted_task_follows_weights_no_more(client, namespace):
    with WeightPublisher(client, "actor", namespace=namespace) as publisher:
        for task in ("old", "new"):
            ExperienceStream(client, task, namespace=namespace, weights="actor")
        ExperienceStream(client, "old", namespace=namespace).clear()
        publisher.publish({"weight": torch.zeros(4)})
        followers = f"redrb:{{{namespace}:weights:actor}}:followers"
        assert client.execute("SMEMBERS", followers) == [
            f"redrb:{{{namespace}:new}}:stream".encode()
        ]
        again = ExperienceStream(client, "old", namespace=namespace, weights="actor")
        again.put(numbered(1), policy_version=0)
        assert again.staleness().current_version == 1
