"""Takes of ranks: all get their parts of the same step, or all get the same error."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redrb.codec import GroupLayout, parse_groups
from redrb.errors import ConfigError, DecodeError, LeaseLost
from redrb.experience import Status
from redrb.stream.ranks.balance import balanced, dealt, tokens_of
from redrb.stream.ranks.rank_requests import MOST_RANKS, Asked, Balance, refuse
from redrb.stream.ranks.rank_store import Answer, CrewStore, Found, Place
from redrb.stream.take.consumer import Consumer, Wanted
from redrb.stream.take.lease import Drawn, Expiry, Lease
from redrb.stream.take.scripts import Outcome, TakeScripts
from redrb.stream.task.scripts import TaskScripts
from redrb.stream.task.store import TaskStore
from redrb.stream.waiting import QUEUE_TTL_MS, Wait

_log = logging.getLogger("redrb")


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of a step, as its lease holds it."""

    crew: CrewStore
    task: str
    consumer: str
    place: Place

    def finish(
        self,
        outcome: Outcome,
        ids: Sequence[int],
        *,
        reason: str = "",
        samples: int = 0,
        ends: bool,
    ) -> bool:
        if not ends and outcome in ("ack", "release", "fail"):
            raise ConfigError(
                f"{outcome}(ids): a rank's part ends as a whole. Call {outcome}() without ids; "
                "reject(reason, ids) and expire(ids) take single groups out before."
            )
        held = self.crew.finish(
            self.consumer, self.place, outcome, ids, reason=reason, samples=samples
        )
        if not held:
            raise LeaseLost(
                task=self.task,
                ids=tuple(ids),
                why=f"rank {self.place.rank} is held by another process, or step "
                f"{self.place.step} was formed anew. Drop what came of it.",
            )
        return held

    def abandon(self, ids: tuple[int, ...]) -> None:
        """Nothing goes back: the part is kept for this rank."""


class Ranks:
    """One process as a rank; it takes its part of every step."""

    def __init__(
        self,
        store: TaskStore,
        consumer: Consumer,
        group: str,
        lease_ms: int,
        reopen: Callable[[], None],
    ) -> None:
        """Make a rank; which one it is, its takes say.

        Args:
            store: The task.
            consumer: The process; its heartbeat says that the rank lives.
            group: Name of the consumer group.
            lease_ms: Silence after which a rank is lost.
            reopen: Creates the task again after somebody cleared it.
        """
        self._store = store
        self._consumer = consumer
        self._crew = CrewStore(store, group)
        self._take_scripts = TakeScripts(store)
        self._task_scripts = TaskScripts(store)
        self._group = group
        self._lease_ms = lease_ms
        self._reopen = reopen
        self._pid = os.getpid()
        self._joined: dict[int, str] = {}

    def take(
        self, place: Place, wanted: Wanted, balance: Balance | None, timeout: float | None
    ) -> Lease:
        """Lease this rank's part of a step, when all ranks have asked for it.

        Raises:
            BatchTimeout: Some rank's time was up first; nobody has a part.
            RankLost: A rank's heartbeat stopped; nobody has a part.
            WrongStep: The step is done, or not the next.
            ConfigError: See `ExperienceStream.take`.
        """
        self._consumer.attend()
        if self._pid != os.getpid():
            self._pid, self._joined = os.getpid(), {}
        size = place.world_size
        least = max(wanted.least // size * size, size)
        asked = Asked(place, Wanted(wanted.count, least, wanted.status, wanted.where), balance)
        wait, attempt = Wait(timeout), 0
        patience: Wait | None = None
        while True:
            last = wait.over
            answer = self._ask(asked, attempt, wait, last=last)
            if answer.outcome == "part":
                lease = self._lease(asked, answer)
                if lease is not None:
                    return lease
            elif answer.outcome == "gone":
                self._reopen()
            elif answer.outcome in ("held", "leased", "differs"):
                # most likely those who died just now, and whose heartbeat is not over
                patience = patience or Wait(2 * self._lease_ms / 1000)
                if last or patience.over:
                    refuse(self._store.task, self._group, asked, answer, wait.waited_s)
                self._block(asked, wait, answer)
            elif answer.outcome == "form":
                attempt = answer.number
                if not self._form(asked, attempt, wait, last=last):
                    self._block(asked, wait, answer)
            elif answer.outcome == "wait":
                attempt = answer.number
                if last:
                    own = asked.wanted
                    waiting = self._task_scripts.count(self._group, own.status, own.where)
                    self._crew.end(attempt, f"{waiting}")
                else:
                    self._block(asked, wait, answer)
            elif answer.outcome != "more":
                refuse(self._store.task, self._group, asked, answer, wait.waited_s)

    def close(self) -> None:
        """Leave: what this rank has is kept, unharmed, for the process that comes after it."""
        if self._pid != os.getpid():
            return  # a fork of the rank: its parts are its parent's
        for rank, consumer in self._joined.items():
            self._crew.finish(consumer, Place(rank, 0, 0), "leave")
        self._joined.clear()

    def _ask(self, asked: Asked, attempt: int, wait: Wait, *, last: bool) -> Answer:
        rank, consumer = asked.place.rank, self._consumer.name
        joined = self._joined.get(rank) == consumer
        answer = self._crew.ask(
            *(consumer, asked.place, asked.spec),
            attempt=attempt,
            joined=joined,
            last=last,
            lease_ms=self._lease_ms,
            retry_s=wait.retry_s,
        )
        if answer.outcome not in ("held", "leased", "replaced", "gone", "more"):
            self._joined[rank] = consumer
        return answer

    def _block(self, asked: Asked, wait: Wait, answer: Answer) -> None:
        if wait.over:
            return
        who = ", ".join(map(str, answer.ranks)) or "none"
        wait.tell(
            f"task {self._store.task!r}, consumer group {self._group!r}, step {asked.place.step}: "
            f"rank {asked.place.rank} waits ({answer.outcome}); for ranks: {who}"
        )
        forming = answer.outcome == "form"
        self._crew.wait(self._consumer.name, wait.slice_s(), forming=forming)

    def _form(self, asked: Asked, attempt: int, wait: Wait, *, last: bool) -> bool:
        """Lease the batch of the step and deal it; False when there is none yet."""
        own, place = asked.wanted, asked.place
        found = self._crew.lease_batch(
            *(self._consumer.name, place.step, attempt),
            count=own.count,
            least=own.least if last else own.count,
            status=own.status,
            where=own.where,
            ttl_ms=0 if last else QUEUE_TTL_MS,
            lease_ms=self._lease_ms,
            retry_s=wait.retry_s,
        )
        if found.outcome == "taken":
            self._crew.assign(place.step, attempt, asked.spec, self._deal(asked, found))
        elif found.outcome == "never":
            raise ConfigError(
                f"task {self._store.task!r} holds at most {found.amounts[0]} groups: a batch of "
                f"{own.count} can never be full. Take fewer, or raise the limit."
            )
        elif found.outcome == "short":
            if last:
                self._crew.end(attempt, " ".join(map(str, found.amounts)))
            return last
        return True

    def _deal(self, asked: Asked, found: Found) -> list[tuple[str, list[int]]]:
        """Return weights and ids of each rank's part; what does not come out even is left over."""
        size = asked.place.world_size
        ids = found.ids[: len(found.ids) // size * size]
        if asked.balance == "tokens":
            places = balanced(self._tokens(asked.place.step, ids), size)
        else:
            places = dealt(len(ids), size)
        parts = []
        for own in places:
            part = [ids[place] for place in own]
            weights = found.weights
            words = weights and [f"{seq}:{weights[seq].decode()}" for seq in [*part, 0]]
            parts.append((" ".join(words or ()), part))
        return parts

    def _tokens(self, step: int, ids: Sequence[int]) -> list[int]:
        """Return the tokens of leased groups; 0 of what cannot be decoded."""
        read = self._crew.read(f"ranks/{step}", len(ids) + MOST_RANKS)
        known = [(seq, blob) for seq in ids if (blob := read.get(seq)) is not None]
        layouts = parse_groups(blob for _, blob in known)
        tokens = {
            seq: tokens_of(layout)
            for (seq, _), layout in zip(known, layouts, strict=True)
            if not isinstance(layout, DecodeError)
        }
        return [tokens.get(seq, 0) for seq in ids]

    def _lease(self, asked: Asked, answer: Answer) -> Lease | None:
        """Return the lease on a part; None when it is to be asked for again.

        What cannot be decoded goes to the dead letters: the part is smaller, the number of steps
        stays equal.
        """
        place, ids = asked.place, answer.ranks
        part = _Part(self._crew, self._store.task, self._consumer.name, place)
        read = self._crew.read(place.slot, len(ids)) if ids else {}
        parsed = iter(parse_groups(blob for seq in ids if (blob := read.get(seq)) is not None))
        good: list[tuple[int, GroupLayout]] = []
        for seq in ids:
            layout = DecodeError("the payload is gone") if read.get(seq) is None else next(parsed)
            if not isinstance(layout, DecodeError):
                good.append((seq, layout))
                continue
            reason = f"cannot be decoded: {layout}"
            _log.error(
                "task %r: group %d, of step %d and rank %d, %s",
                *(self._store.task, seq, place.step, place.rank, reason),
            )
            if not self._crew.finish(part.consumer, place, "reject", [seq], reason=reason):
                return None
        if not good:
            raise DecodeError(
                f"task {self._store.task!r}: nothing is left of the part of rank {place.rank} in "
                f"step {place.step}; see the dead letters, and go on with the next step."
            )
        lease = Lease(self._store.task, good, part, _drawn(answer.text, [seq for seq, _ in good]))
        if asked.wanted.status is Status.EXPIRED:
            told = self._take_scripts.expiries(self._group, lease.ids)
            lease.expiries = {
                seq: None if text is None else Expiry.parse(text)
                for seq, text in zip(lease.ids, told, strict=True)
            }
        return lease


def _drawn(text: str, ids: Sequence[int]) -> Drawn | None:
    """Return how a part's groups were drawn; None when they were not."""
    if not text:
        return None
    pairs = (word.partition(":") for word in text.split())
    weights = {int(seq): float(weight) for seq, _, weight in pairs}
    return Drawn(tuple(weights[seq] for seq in ids), weights[0])
