"""Stages that die, come late and race in any order forward each group exactly once."""

from __future__ import annotations

import random
from collections import Counter
from uuid import uuid4

import pytest

import redrb
from redrb import ExperienceStream, LeaseLost
from redrb.stream.put import receiver
from redrb.stream.take.forwarding import Forwarded, ForwardOptions
from redrb.stream.take.lease import Lease
from tests.audit import audit, kill_consumer
from tests.samples import numbered


class Pipeline:
    """Two tasks, and stages between them that are killed and replaced."""

    def __init__(self, client: redrb.Client, dice: random.Random) -> None:
        self.client, self.dice, self.namespace = client, dice, uuid4().hex
        self.rollouts = self.open("rollouts")
        self.scored = self.open("scored")
        self.opened = [self.rollouts, self.scored]
        self.held: list[tuple[ExperienceStream, Lease]] = []
        self.late: list[Lease] = []
        self.put = 0

    def open(self, task: str, **settings: int) -> ExperienceStream:
        stream = ExperienceStream(
            self.client, task, namespace=self.namespace, max_deliveries=10_000, **settings
        )
        stream.join_group()
        return stream

    def step(self) -> None:
        """Do one thing at random."""
        dice = self.dice
        action = dice.choice(["put", "take", "take", "forward", "store", "kill", "late", "release"])
        if action == "put":
            self.rollouts.put_many([[numbered(self.put + n)] for n in range(3)])
            self.put += 3
        elif action == "take" and self.rollouts.count():
            stream = self.open("rollouts")
            self.opened.append(stream)
            count = dice.randint(1, min(4, self.rollouts.count()))
            self.held.append((stream, stream.take(count, timeout=0)))
        elif action == "late" and self.late:
            self.forward(dice.choice(self.late), stored_only=dice.random() < 0.5)
        elif self.held and action in ("forward", "store", "kill", "release"):
            stream, lease = self.held[dice.randrange(len(self.held))]
            if action in ("forward", "store"):
                self.forward(lease, stored_only=action == "store")
            elif action == "release":
                lease.release()
            else:
                kill_consumer(stream)
                self.late.append(lease)
                self.rollouts._consumer.beat()  # it takes over
            self.held = [each for each in self.held if each[1] and each[1] not in self.late]

    def forward(self, lease: Lease, *, stored_only: bool) -> None:
        """Forward some groups of a lease, or only store them, as a process that then dies."""
        if not lease:
            return
        (part,) = lease.parts
        chosen = self.dice.sample(part.ids, self.dice.randint(1, len(part.ids)))
        groups = dict(zip(lease.ids, lease.groups(), strict=True))
        try:
            if stored_only:
                one = Forwarded(part, chosen, [groups[seq] for seq in chosen])
                one.store(self.scored, ForwardOptions())
            else:
                lease.forward(self.scored, {seq: groups[seq] for seq in chosen})
        except LeaseLost:
            assert lease in self.late

    def finish(self) -> list[int]:
        """Forward all that is left; returns the groups of the second task."""
        for _, lease in self.held:
            lease.release()
        for _ in range(3):  # each of these puts removes records
            self.rollouts.put(numbered(self.put))
            self.put += 1
            lease = self.rollouts.take(self.rollouts.count(), timeout=0)
            lease.forward(self.scored, lease.groups())
        for lease in self.late:
            self.forward(lease, stored_only=False)
        trained = self.scored.take(self.scored.count(), timeout=0)
        return [int(items[0].reward or 0) for items in trained.groups()]


@pytest.mark.parametrize("seed", range(4))
def test_each_group_is_stored_once_in_any_order_of_deaths(seed, monkeypatch):
    dice = random.Random(seed)
    monkeypatch.setattr(receiver, "LOOK_EVERY", dice.choice([1, 3, 8]))
    with redrb.connect(f"fake://{uuid4().hex}") as client:
        pipeline = Pipeline(client, dice)
        for _ in range(60):
            pipeline.step()
        found = Counter(pipeline.finish())
        assert found == Counter(range(pipeline.put))
        ledger = pipeline.rollouts.stats().ledger
        assert (ledger.put, ledger.acked) == (pipeline.put, pipeline.put)
        audit(pipeline.scored)
        for stream in pipeline.opened:
            stream.close()
