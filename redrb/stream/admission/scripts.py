"""Runs the scripts of `redrb/lua/admission`: rights are given, returned and kept alive.

Every method may be repeated with the same arguments when a connection breaks, and is: see the
headers of the scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from redrb.connection.transport import Argument
from redrb.damage import Reading
from redrb.stream.task.store import TaskStore

AdmitOutcome: TypeAlias = Literal["granted", "wait", "unset", "refused", "never", "gone"]


@dataclass(frozen=True, slots=True)
class AdmitReply:
    """The reply to a request for rights.

    Attributes:
        outcome: "granted"; "wait": too few rights are left; "unset": the task has no
            groups_per_version yet; "refused": it gives no rights; "never": more rights are asked
            for than may ever be held; "gone": the task was deleted, or created anew.
        series: Random name of the task's rights.
        version: Weight version that the task knows; None: none.
        numbers: The rights.
        released: Groups that may be begun beyond the bound.
        more: Whether rights of dead makers come back when it is asked again at once.
        held, stored, trained, most, waiting: As in `AdmissionTimeout`.
        oldest_s: Seconds for which the oldest right is held.
        oldest_maker: The maker that holds it.
    """

    outcome: AdmitOutcome
    series: str = ""
    version: int | None = None
    numbers: tuple[int, ...] = ()
    released: int = 0
    more: bool = False
    held: int = 0
    stored: int = 0
    trained: int = 0
    most: int = 0
    waiting: int = 0
    oldest_s: float = 0.0
    oldest_maker: str = ""


class AdmissionScripts:
    """Runs the scripts of makers that begin groups of one task."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store

    def admit(
        self,
        waiter: str,
        count: int,
        least: int,
        *,
        ttl_ms: int,
        lease_ms: int,
        hold_ms: int,
        incarnation: str,
        series: str,
    ) -> AdmitReply:
        """Ask for rights, and queue for them.

        Args:
            waiter: "<maker>/<request>", another one for each request.
            count: Rights.
            least: Fewest rights that are accepted.
            ttl_ms: How long the place in the queue is kept; 0: leave the queue.
            lease_ms: Silence of the maker's heartbeat after which its rights are taken back.
            hold_ms: Time after which the rights are taken back.
            incarnation: Of the task, as this process knows it.
            series: Random name of the rights, if this request creates their counters.
        """
        asked: list[Argument] = [waiter, count, least, ttl_ms, lease_ms, hold_ms]
        asked += [incarnation, series]
        outcome, *found = self._store.run("admission/admit", asked)
        word: AdmitOutcome = outcome.decode()
        if word == "granted":
            name, version, released, *numbers = found
            given = tuple(sorted(map(int, numbers)))
            return AdmitReply(
                word, name.decode(errors="replace"), _version(version), given, int(released)
            )
        if word == "wait":
            version, more, held, stored, trained, most, waiting, age_ms, oldest = found
            return AdmitReply(
                word,
                more=bool(more),
                version=_version(version),
                held=held,
                stored=stored,
                trained=trained,
                most=most,
                waiting=waiting,
                oldest_s=age_ms / 1000,
                oldest_maker=oldest.decode(errors="replace").partition("/")[0],
            )
        return AdmitReply(word, most=int(found[0]) if found else 0)

    def give_back(self, series: str, numbers: Sequence[int]) -> None:
        """Return rights that are not used."""
        self._store.run("admission/give_back", [series, "", *numbers])

    def leave(self, holder: str) -> None:
        """Return all rights of a maker, or of a waiter, which leaves the queue."""
        for _ in self._store.pages("admission/give_back", ["", holder]):
            pass

    def heartbeat(
        self,
        maker: str,
        lease_ms: int,
        incarnation: str,
        worker: str = "",
        announcement: bytes = b"",
    ) -> tuple[str, int, bool]:
        """Renew a maker's deadline, and store the announcement of its worker, if it is not b"".

        Returns:
            "held", "lost" or "anew"; the number of rights taken back; whether there may be more.
        """
        arguments: list[Argument] = [maker, lease_ms, incarnation, worker, announcement]
        outcome, lost, more = self._store.run("admission/heartbeat", arguments)
        return outcome.decode(), int(lost), bool(more)


@Reading("the weight version of a task")
def _version(text: bytes) -> int | None:
    return int(text) if text else None
