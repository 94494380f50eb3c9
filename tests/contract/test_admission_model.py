"""Random interleavings of makers and trainers: with admission no group is ever too stale."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import redrb
from redrb import BatchTimeout, ExperienceStream, Status
from redrb.errors import AdmissionTimeout
from redrb.stream import Admission, Lease
from redrb.stream.admission.calls import Admit, BeatMaker, GiveBack
from redrb.stream.put.rights import Rights
from redrb.stream.take.calls import Leave, Take, TakeRequest
from tests.samples import numbered

SHARED = [HealthCheck.function_scoped_fixture]

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
        self, url: str, bound: int, per_version: int, order: str, slow: int, *, background: bool
    ) -> None:
        self.bound, self.per_version, self.background = bound, per_version, background
        self.slow = slow
        self.client = redrb.connect(url)
        self.stream = ExperienceStream(
            self.client,
            "math",
            namespace=uuid4().hex,
            max_staleness=bound,
            groups_per_version=per_version,
            order=order,
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


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True])
@given(
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from(["admission", "fifo"]),
    st.integers(0, 2),
    st.lists(STEPS, min_size=40, max_size=80),
)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=SHARED)
def test_no_group_that_was_admitted_is_ever_too_stale(
    real_url, background, bound, per_version, order, slow, steps
):
    model = Model(real_url, bound, per_version, order, slow, background=background)
    try:
        for name, *arguments in steps:
            getattr(model, name)(*arguments)
            model.check()
    finally:
        model.close()


WAITING_STEPS = st.sampled_from(
    [
        *[("ask", 4, 1), ("ask", 2, 2), ("put",), ("take",), ("ack",), ("publish",)] * 3,
        *[("ask", 3, 3), ("back",), ("kill",), ("die",), ("give_up",), ("drop",), ("jump",)],
        *[("hungry", 1), ("hungry", 2), ("hungry", 5), ("fed",), ("bound", 2), ("bound", 1)],
        *[("bound", 0), ("per_version", 1), ("per_version", 3)],
    ]
)


class Waiters:
    """Requests for rights that wait, and nobody who looks by himself.

    Each must be woken when it would be answered, be it with rights or with an error.
    """

    def __init__(self, bound: int, per_version: float) -> None:
        self.client = redrb.connect(f"fake://{uuid4().hex}")
        self.stream = ExperienceStream(
            self.client, "math", max_staleness=bound, groups_per_version=per_version
        )
        self.stream.join_group()
        self.version = self.stream.advance(1)
        self.task = self.stream._task
        self.store, self.prefix = self.task.store, self.task.store.keys.prefix
        self.waiting: dict[str, tuple[int, int]] = {}
        self.held: list[tuple[str, str, tuple[int, ...]]] = []
        self.leases: deque[Lease] = deque()
        self.number = 0

    def close(self) -> None:
        self.stream.close()
        self.client.close()

    def ask(self, count: int, least: int) -> None:
        self.number += 1
        self.look(f"maker-{self.number}/1", count, least)

    def look(self, waiter: str, count: int, least: int) -> str:
        incarnation, hour = self.task.description.incarnation, 3_600_000
        reply = self.store.call(
            Admit(waiter, count, least, hour, hour, hour, incarnation, "series")
        )
        self.waiting.pop(waiter, None)
        if reply.outcome == "granted":
            self.held.append((waiter, reply.series, reply.numbers))
        elif reply.outcome == "wait":
            self.waiting[waiter] = (count, least)
        return reply.outcome

    def put(self) -> None:
        if self.held:
            _, series, numbers = self.held.pop(0)
            rights = Rights("math", self.prefix, series, numbers)
            groups = [[numbered(0)] for _ in numbers]
            self.stream.put_many(groups, policy_version=self.version, admission=rights)

    def back(self) -> None:
        if self.held:
            _, series, numbers = self.held.pop()
            self.store.call(GiveBack(series=series, numbers=tuple(map(str, numbers))))

    def kill(self) -> None:
        """A maker with rights dies, and another one finds its deadline over."""
        if self.held:
            maker = self.held.pop()[0].partition("/")[0]
            self.client.execute("ZADD", f"{self.prefix}makers", "XX", 1, maker)
            incarnation = self.task.description.incarnation
            self.store.call(BeatMaker("other", 3_600_000, incarnation))

    def die(self) -> None:
        """A maker that waits is killed; its machine knows it."""
        if self.waiting:
            waiter = next(iter(self.waiting))
            del self.waiting[waiter]
            self.store.call(GiveBack(holder=waiter.partition("/")[0], died=True))

    def give_up(self) -> None:
        if self.waiting:
            waiter, (count, least) = self.waiting.popitem()
            incarnation, hour = self.task.description.incarnation, 3_600_000
            self.store.call(Admit(waiter, count, least, 0, hour, hour, incarnation, "series"))
            self.store.call(GiveBack(holder=waiter))

    def take(self) -> None:
        with suppress(BatchTimeout):
            self.leases.append(self.stream.take(2, timeout=0))

    def ack(self) -> None:
        if self.leases:
            self.leases.popleft().ack()

    def drop(self) -> None:
        if self.leases:
            self.leases.popleft().reject("bad")

    def publish(self) -> None:
        self.version = self.stream.advance(self.version + 1)

    def jump(self) -> None:
        """Weights go on so far that what waits expires at the next take."""
        self.version = self.stream.advance(self.version + 5)
        self.stream.expire()

    def bound(self, versions: int) -> None:
        self.stream.configure(max_staleness=versions)

    def per_version(self, groups: int) -> None:
        self.stream.configure(groups_per_version=groups)

    def hungry(self, groups: int) -> None:
        """A take waits for groups, which makers may begin beyond the bound."""
        self.fed()
        self.number += 1
        request = TakeRequest(groups, groups, Status.COMPLETED, "")
        revision, hour = self.task.description.revision, 3_600_000
        names = ("default", "hungry", "hungry/0", str(self.number), request, "hungry.w")
        self.store.call(Take(*names, hour, hour, revision))

    def fed(self) -> None:
        list(self.store.pages(Leave("default", "hungry")))
        keys = [f"{self.prefix}{kind}:default" for kind in ("queue", "needs")]
        self.client.execute("DEL", *keys)

    def check(self) -> None:
        for waiter, (count, least) in list(self.waiting.items()):
            woken = self.client.execute("DEL", f"{self.prefix}wake:{waiter}")
            outcome = self.look(waiter, count, least)
            assert woken or outcome == "wait", (waiter, outcome)


@given(
    st.integers(0, 2),
    st.sampled_from([1, 2, 3, 2.4]),
    st.lists(WAITING_STEPS, min_size=30, max_size=60),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_request_that_would_be_answered_waits_without_being_woken(bound, per_version, steps):
    waiters = Waiters(bound, per_version)
    try:
        for name, *arguments in steps:
            getattr(waiters, name)(*arguments)
            waiters.check()
    finally:
        waiters.close()
