"""`Reach`: which partitions of a task are on nodes that cannot be reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from redrb.connection.deadline import GRACE_S, SHORT_OUTAGE_S, Deadline
from redrb.connection.outage import Outage, shared_outage
from redrb.connection.request import Request
from redrb.errors import StoreError, StoreUnavailable
from redrb.stream.task.store import TaskStore

AWAY_S = 5.0
"""Time for which a node that could not be reached is left out, where others can be reached."""

T = TypeVar("T")


class Reach:
    """Knows which partitions of a task are on nodes that cannot be reached; safe among threads.

    It learns that from requests. A node is left out for `AWAY_S` and then asked again, so that an
    outage costs one request in this time and not each of them.
    """

    def __init__(self, stores: Sequence[TaskStore]) -> None:
        self.stores = stores
        self._away: dict[str, float] = {}  # node -> when it is asked again

    @property
    def away(self) -> tuple[int, ...]:
        """Partitions that are left out now."""
        now = time.monotonic()
        nodes = {node for node, until in tuple(self._away.items()) if now < until}
        if not nodes:
            return ()
        return tuple(number for number, one in enumerate(self.stores) if one.client.node in nodes)

    @property
    def all_away(self) -> bool:
        """Whether no partition can be reached."""
        return len(self.away) == len(self.stores)

    def near(self) -> list[int]:
        """Return the partitions to ask: all but those left out, or all if none would be left."""
        away, every = self.away, range(len(self.stores))
        return [number for number in every if number not in away] or list(every)

    def lose(self, number: int, error: StoreUnavailable) -> None:
        """Note that a partition could not be reached."""
        node = self.stores[number].client.node
        self._outage(node).failed(error, who=self)
        self._away[node] = time.monotonic() + AWAY_S

    def find(self, number: int) -> None:
        """Note that a partition was reached."""
        if self._away:
            others = {one.client.node for one in self.stores}
            others.discard(self.stores[number].client.node)
            for node in self._away.keys() - others:  # also nodes that serve no partition any more
                if self._away.pop(node, None) is not None:
                    self._outage(node).over(who=self)

    def ask(self, look: Callable[[int], T]) -> dict[int, T]:
        """Call `look` with the number of each partition, one after the other.

        Returns:
            The results by partition; partitions that cannot be reached are left out.

        Raises:
            StoreUnavailable: None could be reached within the time of the client.
        """
        if len(self.stores) == 1:
            return {0: look(0)}
        found: dict[int, T] = {}
        for number in range(len(self.stores)):
            if number in self.away:
                continue
            try:
                with Deadline(at_most=GRACE_S):
                    found[number] = look(number)
                self.find(number)
            except StoreUnavailable as error:
                self.lose(number, error)
        return found or {number: look(number) for number in range(len(self.stores))}

    def replies(self, request: Callable[[int], Request[T]], among: Collection[int]) -> dict[int, T]:
        """Send a request to each of some partitions, and read the replies when all are sent.

        Partitions that cannot be reached are left out. If none can be, they are waited for.

        Raises:
            StoreUnavailable: None could be reached for as long as the call waits.
        """
        patient = self.all_away
        short = Deadline(repeat_s=None if patient else SHORT_OUTAGE_S)
        sent: list[tuple[int, Request[T]]] = []
        found: dict[int, T] = {}
        try:
            for number in self.near():
                if number in among:
                    sent.append((number, request(number)))
                    sent[-1][1].begin()
            while sent:
                number, one = sent.pop(0)
                try:
                    with short:
                        found[number] = one.result()
                    self.find(number)
                except StoreUnavailable as error:
                    self.lose(number, error)
                    if patient:
                        raise
        finally:
            for _, one in sent:
                one.drop()
        return self.replies(request, among) if self.all_away and not patient else found

    def answering(self) -> list[int]:
        """Return the partitions whose nodes answer now; a single one is not asked."""
        if len(self.stores) == 1:
            return [0]
        return [number for number in range(len(self.stores)) if self._answers(number)]

    def each(self, numbers: Iterable[int], call: Callable[[int], T]) -> dict[int, T]:
        """Call `call` with the number of each of some partitions, one after the other.

        Partitions whose nodes do not answer come last, and share the time of one request.

        Raises:
            StoreUnavailable: Some could not be reached: it names them. All others were called.
            StoreError: Another error of a partition. All others were called.
        """
        if len(self.stores) == 1:
            return {number: call(number) for number in numbers}
        found: dict[int, T] = {}
        errors: dict[int, StoreError] = {}

        def call_all(some: Iterable[int]) -> None:
            for number in some:
                try:
                    found[number] = call(number)
                    self.find(number)
                except StoreError as error:
                    errors[number] = error

        wanted = list(numbers)
        soon = [number for number in wanted if len(wanted) == 1 or self._answers(number)]
        call_all(soon)
        with Deadline(self.stores[0].client.retry_s):
            call_all(number for number in wanted if number not in soon)
        for error in errors.values():
            if not isinstance(error, StoreUnavailable):
                raise error
        if errors:
            raise self.missing(errors) from next(iter(errors.values()))
        return found

    def missing(self, errors: Mapping[int, Exception | None]) -> StoreUnavailable:
        """Return the error that names the partitions that could not be reached."""
        numbers = ", ".join(f"partition {number}" for number in errors)
        causes = [error for error in errors.values() if isinstance(error, StoreUnavailable)]
        return StoreUnavailable(
            f"{numbers} of task {self.stores[0].task!r} could not be reached; the call is done in "
            f"all others. Repeat it when they are back. {causes[0] if causes else ''}".rstrip(),
            where=self.stores[next(iter(errors))].client.where,
            uncertain=any(error.uncertain for error in causes),
        )

    def _outage(self, node: str) -> Outage:
        """Return the outage of all partitions on a node."""
        return shared_outage(f"task {self.stores[0].task!r}: partitions on {node} are left out", "")

    def _answers(self, number: int) -> bool:
        """Return whether the node of a partition answers."""
        if number in self.away:
            return False
        store = self.stores[number]
        try:
            with Deadline(at_most=GRACE_S):
                store.client.execute("EXISTS", store.keys.task)
        except StoreUnavailable as error:
            self.lose(number, error)
            return False
        except StoreError:
            pass  # an answer, too: the call that follows says the same
        return True
