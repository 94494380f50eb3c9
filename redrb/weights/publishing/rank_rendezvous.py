"""Ranks that publish one version together: who has what, where it goes, what became of it.

Rank 0 reads one mailbox, in which every other rank offers its part and then says that it is staged.
It answers each in a mailbox that only this attempt reads. So a rank that died and came again is
told apart from its earlier self, and nobody waits for an answer to a question of before.

Every rank counts its calls of `publish`, and rank 0 knows which count of a rank belongs to which of
its own: shards of different calls are never put together, though one of them was not waited for.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from redrb.connection import Client
from redrb.errors import DecodeError, WeightError
from redrb.keys import WeightKeys
from redrb.weights.publishing.mailbox import Mailbox
from redrb.weights.publishing.staging import StagedPart, StagingPlace
from redrb.weights.wire.layout import Layout
from redrb.weights.wire.manifest import MAX_VERSION, Source
from redrb.weights.wire.tensor_list import list_tensors, read_tensors

AGAIN: Final = "again"
"""In place of a reason: all ranks begin anew."""


class BeginAgainError(Exception):
    """Something that this attempt stands on is gone, or a rank came anew."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank would publish.

    Attributes:
        rank: Its rank.
        call: Tells this attempt from others.
        chunks: Of its state.
        version: The version that it was told to publish, 0 for the next.
        base: The version that it has a difference to, 0 for none.
    """

    rank: int
    call: str
    chunks: int
    version: int
    base: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What a rank is to stage."""

    place: StagingPlace
    whole: bool
    delta: bool


class RendezvousMember:
    """A rank that is not rank 0, in one call of `publish`; close it when that is over."""

    def __init__(
        self,
        client: Client,
        keys: WeightKeys,
        rank: int,
        timeout: float,
        *,
        publisher: str,
        number: int,
    ) -> None:
        """Make an attempt of `publisher`'s call `number`."""
        self._sender = {"rank": rank, "publisher": publisher, "number": number}
        self._rank = rank
        self._timeout = timeout
        self._call = uuid.uuid4().hex
        self._offered = False
        self._inbox_of_rank_0 = Mailbox(client, keys.meeting)
        self._answers = Mailbox(client, keys.answers(self._call))

    def decision(self, *, chunks: int, version: int, base: int) -> Decision:
        """Offer a part; returns what to stage of it.

        Raises:
            WeightError: Rank 0 did not answer in time, or failed.
            BeginAgainError: All begin anew.
        """
        self._tell({"chunks": chunks, "version": version, "base": base})
        self._offered = True
        told = self._told()
        try:
            place = StagingPlace(told["version"], told["token"], told["first"], told["spread"])
            return Decision(place, bool(told["whole"]), bool(told["delta"]))
        except KeyError as error:
            raise DecodeError(f"rank 0's answer lacks {error}") from error

    def outcome(self, part: StagedPart) -> tuple[bytes, float]:
        """Say that a part is staged; returns the version's manifest and time once it is committed.

        Raises:
            WeightError, BeginAgainError: As in `decision`.
        """
        self._tell({"part": _packed(part)})
        while "token" in (told := self._told()):
            pass  # the decision, which may have come twice
        manifest, created_s = told.get("manifest"), told.get("created_s")
        if not isinstance(manifest, bytes) or not isinstance(created_s, float):
            raise DecodeError("rank 0's answer has no manifest")
        return manifest, created_s

    def fail(self, error: BaseException) -> None:
        """Let rank 0 know that nothing comes of this call."""
        self._tell({"error": f"{type(error).__name__}: {error}", "offered": self._offered})

    def close(self) -> None:
        """Delete the answers, of which no more are read."""
        self._answers.delete()

    def _tell(self, message: dict[str, Any]) -> None:
        self._inbox_of_rank_0.post({**self._sender, "call": self._call, **message})

    def _told(self) -> dict[str, Any]:
        told = self._answers.next(time.monotonic() + self._timeout)
        if told is None:
            raise WeightError(
                f"rank 0 did not answer rank {self._rank} within {self._timeout:g} s: see whether "
                "it runs, and calls publish as often as this one."
            )
        if told.get("error") == AGAIN:
            raise BeginAgainError
        if "error" in told:
            raise WeightError(f"no rank has published: {told['error']!s:.500}")
        return told


class RendezvousLeader:
    """Rank 0, over all calls of `publish`."""

    def __init__(self, client: Client, keys: WeightKeys, world_size: int, timeout: float) -> None:
        self._client = client
        self._keys = keys
        self._inbox = Mailbox(client, keys.meeting)
        self._others = range(1, world_size)
        self._timeout = timeout
        self._number = 0
        self._known: dict[int, tuple[str, int]] = {}  # rank -> publisher, its count at our 0
        self._missed: set[int] = set()  # ranks that were not waited for
        self._later: deque[dict[str, Any]] = deque()  # messages of calls that are still to come
        self._offers: dict[int, Offer] = {}

    def begin(self) -> None:
        """Begin a call of `publish`."""
        self._number += 1

    def offers(self) -> list[Offer]:
        """Return every other rank's offer, by rank.

        Raises:
            WeightError: Some did not come in time, or failed.
        """
        deadline = time.monotonic() + self._timeout
        gave_up: dict[int, str] = {}
        later, self._later = self._later, deque()
        while missing := [r for r in self._others if r not in self._offers and r not in gave_up]:
            message = later.popleft() if later else self._next(deadline, missing)
            rank, ahead = message["rank"], self._ahead(message)
            if ahead < 0:
                self._refuse(message)
            elif ahead > 0:
                self._later.append(message)
                gave_up.setdefault(rank, "it has called publish more often than rank 0")
            elif "error" not in message:
                self._note(message)
            else:
                # the others are waited for nevertheless: so all of them are told at once
                self._offers.pop(rank, None)
                gave_up[rank] = str(message["error"])
        self._later.extend(later)
        for rank, why in gave_up.items():
            raise WeightError(f"rank {rank}: {why:.500}")
        return [self._offers[rank] for rank in self._others]

    def decide(self, offer: Offer, decision: Decision) -> None:
        """Tell a rank what to stage."""
        place = decision.place
        self._answer(
            offer,
            {
                "version": place.version,
                "token": place.token,
                "first": place.first,
                "spread": place.spread,
                "whole": decision.whole,
                "delta": decision.delta,
            },
        )

    def parts(self, decisions: dict[int, Decision]) -> list[StagedPart]:
        """Return what the other ranks have staged, by rank.

        Raises:
            WeightError: Some did not come in time, or failed.
            BeginAgainError: A rank came anew meanwhile.
        """
        deadline = time.monotonic() + self._timeout
        parts: dict[int, StagedPart] = {}
        while len(parts) < len(self._others):
            message = self._next(deadline, [r for r in self._others if r not in parts])
            rank, offer = message["rank"], self._offers[message["rank"]]
            ahead = self._ahead(message)
            if ahead > 0:
                self._later.append(message)
                if "chunks" in message:
                    raise WeightError(f"rank {rank} has called publish again meanwhile.")
            elif ahead < 0:
                continue  # what is left of a call that is over
            elif "error" in message:
                del self._offers[rank]
                raise WeightError(f"rank {rank}: {message['error']!s:.500}")
            elif "chunks" in message:
                if message["call"] != offer.call:  # a new process, or that one came twice
                    self._note(message)
                    raise BeginAgainError
            elif message["call"] == offer.call and "part" in message:
                parts[rank] = _unpacked(message["part"], decisions[rank].place)
        return [parts[rank] for rank in self._others]

    def end(self, answer: dict[str, Any]) -> None:
        """Tell all ranks that wait what became of it."""
        self._inbox.forget_read()  # so that nobody takes it for news
        offers, self._offers = self._offers, {}
        for offer in offers.values():
            self._answer(offer, answer)

    def _ahead(self, message: dict[str, Any]) -> int:
        """Return by how many calls a rank is ahead of rank 0; below 0: a call that is over.

        Of a process that is new, the first call belongs to this one; but where its rank was not
        waited for before, that may have been meant.
        """
        rank, publisher, number = message["rank"], message["publisher"], message["number"]
        known = self._known.get(rank)
        if known is None or known[0] != publisher:
            missed = int(rank in self._missed)
            known = self._known[rank] = (publisher, number - self._number + missed)
        self._missed.discard(rank)
        ahead: int = number - self._number - known[1]
        return ahead

    def _refuse(self, message: dict[str, Any]) -> None:
        if "chunks" in message:
            why = (
                "rank 0 has not waited for this call any longer, and is at a later one. Publish "
                "the next version; with a larger timeout= it would wait."
            )
            Mailbox(self._client, self._keys.answers(message["call"])).post({"error": why})

    def _note(self, message: dict[str, Any]) -> None:
        numbers = [message.get(name) for name in ("chunks", "version", "base")]
        if not all(type(number) is int and 0 <= number <= MAX_VERSION for number in numbers):
            return  # what is left of a call that is over
        chunks, version, base = numbers
        rank = message["rank"]
        self._offers[rank] = Offer(rank, message["call"], chunks or 0, version or 0, base or 0)

    def _next(self, deadline: float, missing: list[int]) -> dict[str, Any]:
        while True:
            message = self._inbox.next(deadline)
            if message is None:
                self._missed.update(missing)
                raise WeightError(
                    f"ranks {missing} did not come within {self._timeout:g} s: see whether they "
                    "run, and call publish as often as rank 0."
                )
            names = isinstance(message.get("call"), str) and isinstance(
                message.get("publisher"), str
            )
            number, rank = message.get("number"), message.get("rank")
            if names and type(number) is int and rank in self._others and self._counts(message):
                return message

    def _counts(self, message: dict[str, Any]) -> bool:
        """Return whether it is not what is left of a process that is gone."""
        known = self._known.get(message["rank"])
        if known is not None and known[0] == message["publisher"]:
            return True
        return "chunks" in message or message.get("offered") is False

    def _answer(self, offer: Offer, message: dict[str, Any]) -> None:
        Mailbox(self._client, self._keys.answers(offer.call)).post(message)


def _packed(part: StagedPart) -> dict[str, Any]:
    return {
        "tensors": list_tensors(part.layout),
        "nbytes": part.layout.nbytes,
        "chunk_bytes": part.layout.chunk_bytes,
        "checksums": list(part.checksums),
        "sources": [[run.token, run.first, run.count] for run in part.sources],
        "sizes": None if part.sizes is None else list(part.sizes),
        "pieces": list(part.pieces),
    }


def _unpacked(stored: Any, place: StagingPlace) -> StagedPart:
    """Return a part; what is wrong in it shows when all of them are joined."""
    try:
        sizes = stored["sizes"]
        numbers = [stored["nbytes"], stored["chunk_bytes"], *stored["checksums"], *stored["pieces"]]
        if not all(type(number) is int and number >= 0 for number in [*numbers, *(sizes or [])]):
            raise TypeError("a number is none")
        tensors = read_tensors(stored["tensors"], whole=False)
        return StagedPart(
            place=place,
            layout=Layout(tensors, stored["nbytes"], stored["chunk_bytes"]),
            checksums=tuple(stored["checksums"]),
            sources=tuple(Source(*run) for run in stored["sources"]),
            sizes=None if sizes is None else tuple(sizes),
            pieces=tuple(stored["pieces"]),
        )
    except (KeyError, TypeError) as error:
        raise DecodeError(f"a rank's part is damaged: {error!r:.80}") from error
