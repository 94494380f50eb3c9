"""A hundred threads on one task: nothing twice, nothing lost, and the ledger balances."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from redrb import BatchTimeout, ExperienceStream, Lease
from tests.audit import audit
from tests.samples import numbered, numbers

PUTTERS, TAKERS = 40, 60
GROUPS_EACH = 10


class Holders:
    """Notices when two leases hold a group at once, or when one is acknowledged twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self.acked: Counter[int] = Counter()
        self.twice: list[int] = []

    def take(self, lease: Lease) -> None:
        with self._lock:
            self.twice += self._held.intersection(lease.ids)
            self._held.update(lease.ids)

    def ack(self, lease: Lease) -> None:
        """Acknowledge; what is acknowledged stays held for good."""
        taken = numbers(lease)
        lease.ack()
        with self._lock:
            self.acked.update(taken)

    def let_go(self, lease: Lease) -> None:
        """Forget a lease that is about to end otherwise."""
        with self._lock:
            self._held.difference_update(lease.ids)


def test_a_hundred_threads_lose_nothing_and_do_nothing_twice(client, namespace):
    putters, takers = PUTTERS, TAKERS
    if client.url.startswith("fake:"):  # it runs scripts in this process: more would only starve it
        putters, takers = putters // 4, takers // 4
    total = putters * GROUPS_EACH
    holders = Holders()
    streams = [
        ExperienceStream(client, "math", namespace=namespace, limit=48, lease_ms=1000)
        for _ in range(6)
    ]

    def put(thread):
        first = thread * GROUPS_EACH
        own = range(first, first + GROUPS_EACH)
        stream = streams[thread % len(streams)]
        for start in range(0, GROUPS_EACH, 2):
            stream.put_many([[numbered(n)] for n in own[start : start + 2]], timeout=60)

    def take(thread):
        dice = random.Random(thread)
        stream = streams[thread % len(streams)]
        while len(holders.acked) < total:
            try:
                lease = stream.take(dice.randint(1, 8), timeout=0.3, at_least=1)
            except BatchTimeout:
                continue
            holders.take(lease)
            fate = dice.random()
            if fate < 0.75:
                holders.ack(lease)
                continue
            holders.let_go(lease)
            if fate < 0.9:
                lease.release()
            elif fate < 0.97:
                del lease  # the heartbeat gives it back
            else:
                lease._end("fail", None)

    with ThreadPoolExecutor(putters + takers) as pool:
        futures = [pool.submit(put, thread) for thread in range(putters)]
        futures += [pool.submit(take, thread) for thread in range(takers)]
        for future in futures:
            future.result(timeout=60)
    gc.collect()
    audit(streams[0])
    ledger = streams[0].stats().ledger
    assert holders.twice == []
    assert holders.acked == dict.fromkeys(range(total), 1)
    assert (ledger.put, ledger.acked, ledger.leased, ledger.waiting) == (total, total, 0, 0)
    assert ledger.balanced
    for stream in streams:
        stream.close()
