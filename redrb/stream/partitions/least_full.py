"""`LeastFull`: chooses the partition that a put goes to."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection

PUTS_A_LOOK = 4
"""One put of so many a partition goes to the partition that was not put to for the longest time.

Its reply says how full that partition is. Without this a partition that was full once, and that
takers have emptied since, would not be noticed before the others are as full.
"""


class LeastFull:
    """Knows how full partitions are, from the replies to puts; safe among threads.

    No request is sent for it: a put's reply has the number of groups in its partition, and groups
    that are on their way are added here.
    """

    def __init__(self, partitions: int) -> None:
        self._backlogs = [0] * partitions
        # in random order, so that many makers do not all begin with the same partition
        self._last_puts = random.sample(range(-partitions, 0), partitions)
        self._puts = 0
        self._lock = threading.Lock()

    def choose(self, groups: int, but: Collection[int] = ()) -> int:
        """Return the partition for a put of so many groups; one of `but` only if there is no other.

        Among partitions that are equally full it is the one that was not put to for the longest
        time.
        """
        every = range(len(self._backlogs))
        with self._lock:
            open_to = [number for number in every if number not in but] or list(every)
            self._puts += 1
            if self._puts % (PUTS_A_LOOK * len(every)):
                chosen = min(open_to, key=lambda one: (self._backlogs[one], self._last_puts[one]))
            else:
                chosen = min(open_to, key=self._last_puts.__getitem__)
            self._last_puts[chosen] = self._puts
            self._backlogs[chosen] += groups
        return chosen

    def note(self, partition: int, backlog: int) -> None:
        """Note how many groups a partition holds."""
        with self._lock:
            self._backlogs[partition] = backlog
