"""Random interleavings of makers and trainers: with admission no group is ever too stale."""

from __future__ import annotations

from collections import deque
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import redrb
from redrb import BatchTimeout, ExperienceStream
from redrb.errors import AdmissionTimeout
from redrb.stream import Admission, Lease
from redrb.stream.admission.calls import BeatMaker
from tests.samples import numbered

STEPS = st.sampled_from(
    [
        *[("begin", 8), ("put_fast",), ("take", 0), ("ack",), ("publish",)] * 5,
        *[("begin", 1), ("begin", 2), ("put", 0), ("put", 1)],
        *[("cancel", 1), ("kill", 0), ("take", 1), ("take", 2), ("drop",)],
    ]
)


class Model:
    """One trainer and several makers, who follow the rules of admission."""

    def __init__(
        self, bound: int, per_version: int, order: str, slow: int, *, background: bool
    ) -> None:
        self.bound, self.per_version, self.background = bound, per_version, background
        self.slow = slow
        self.client = redrb.connect(f"fake://{uuid4().hex}")
        self.stream = ExperienceStream(
            self.client, "math", max_staleness=bound, groups_per_version=per_version, order=order
        )
        self.version = self.stream.advance(1)
        self.rights: list[Admission] = []
        self.leases: deque[Lease] = deque()
        self.unpublished = 0  # groups of all batches that were taken since the last version
        self.lost = 0

    def close(self) -> None:
        self.stream.clear()
        self.stream.close()
        self.client.close()

    def begin(self, count: int) -> None:
        try:
            self.rights.append(self.stream.admit(count, least=1, timeout=0))
        except (AdmissionTimeout, redrb.ConfigError):
            return
        assert self.rights[-1].version == self.version

    def put(self, which: int) -> None:
        if right := self._right(which):
            self.stream.put(numbered(0), policy_version=right.version, admission=right)
            self._forget_used()

    def put_fast(self) -> None:
        """Put all groups that were begun, but the first ones: their rollouts are slow."""
        slow = self.slow
        for right in self.rights:
            kept, slow = min(slow, right.left), max(slow - right.left, 0)
            held = [right._left.pop(0) for _ in range(kept)]
            while right.left:
                self.stream.put(numbered(0), policy_version=right.version, admission=right)
            right._left[:0] = held
        self._forget_used()

    def cancel(self, which: int) -> None:
        if right := self._right(which):
            right.cancel()
            self._forget_used()

    def kill(self, which: int) -> None:
        """The maker dies: its rights are taken back."""
        if right := self._right(which):
            prefix = self.stream._task.store.keys.prefix
            numbers = tuple(right._left)
            self.client.execute("ZADD", f"{prefix}holds", *(w for n in numbers for w in (0, n)))
            task = self.stream._task
            task.store.call(BeatMaker("other", 30_000, task.description.incarnation))
            self.lost += len(numbers)
            right._left.clear()
            self._forget_used()

    def take(self, more: int) -> None:
        """Take a batch of a version; only a trainer that publishes at once may take more."""
        if self.background and len(self.leases) + self.unpublished > self.bound:
            return
        if not self.background and self.leases:
            return
        count = self.per_version + (0 if self.background else more)
        try:
            lease = self.stream.take(count, timeout=0)
        except BatchTimeout:
            return
        behind = [self.version - (each or 0) for each in lease.policy_versions]
        assert max(behind) <= self.bound
        self.leases.append(lease)

    def ack(self) -> None:
        if self.leases and (self.background or not self.unpublished):
            self.leases.popleft().ack()
            self.unpublished += 1

    def publish(self) -> None:
        """Publish the oldest version whose batch was taken, acknowledged or not."""
        if self.unpublished:
            self.unpublished -= 1
        elif self.leases:
            self._advance()
            self.leases.popleft().ack()
            return
        else:
            return
        self._advance()

    def drop(self) -> None:
        """A group leaves without being trained."""
        if self.stream.count():
            with self.stream.take(1, timeout=0) as lease:
                lease.reject("bad")

    def check(self) -> None:
        stats = self.stream.stats()
        rights = stats.admission
        assert rights.balanced
        assert rights.held == sum(right.left for right in self.rights)
        assert (rights.lost, rights.late, rights.released) == (self.lost, 0, 0)
        assert rights.held + stats.stored <= rights.most + self.per_version * (1 + self.bound)
        assert stats.ledger.expired == 0
        assert stats.ledger.balanced

    def _right(self, which: int) -> Admission | None:
        return self.rights[which % len(self.rights)] if self.rights else None

    def _forget_used(self) -> None:
        self.rights = [right for right in self.rights if right.left]

    def _advance(self) -> None:
        self.version = self.stream.advance(self.version + 1)


@pytest.mark.parametrize("background", [False, True])
@given(
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from(["admission", "fifo"]),
    st.integers(0, 2),
    st.lists(STEPS, min_size=40, max_size=80),
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_no_group_that_was_admitted_is_ever_too_stale(
    background, bound, per_version, order, slow, steps
):
    model = Model(bound, per_version, order, slow, background=background)
    try:
        for name, *arguments in steps:
            getattr(model, name)(*arguments)
            model.check()
    finally:
        model.close()
