"""The rendezvous of ranks that publish one version: offers to rank 0, and its replies.

Every rank but 0 posts to one stream that rank 0 reads: first its offer, then its staged part. Rank
0 replies in a stream that belongs to one attempt of one rank. So rank 0 distinguishes a restarted
rank from its earlier process, and no rank reads the reply to an earlier attempt.

A restarted rank 0 finds the offers to its earlier process and decides anew, under other tokens. A
staged part names its token: rank 0 uses only parts that were staged by its own decision, and a rank
that reads a newer decision stages its part again.

Every rank counts its calls of `publish`, and rank 0 maps the count of each rank to the count of
rank 0. So shards of different calls never become one version, even if rank 0 did not wait for one
of them.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from typing import Any

from redrb.connection import Client
from redrb.connection.messages import MessageReader, post
from redrb.errors import DecodeError, WeightError
from redrb.keys import WeightKeys
from redrb.weights.publishing.rank_messages import (
    BEGIN_AGAIN,
    EXPIRE_MS,
    BeginAgainError,
    Decision,
    Offer,
    pack_decision,
    pack_part,
    token_of,
    unpack_decision,
    unpack_offer,
    unpack_part,
)
from redrb.weights.publishing.staging import StagedPart, TokenUsedError
from redrb.weights.wire.manifest import MAX_LISTS


class RendezvousMember:
    """A rank other than 0, in one attempt of one call of `publish`; close it at the end."""

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
        """Begin an attempt of call `number` of `publisher`, the random id of this process."""
        self._client = client
        self._sender = {"rank": rank, "publisher": publisher, "number": number}
        self._rank = rank
        self._timeout = timeout
        self._call = uuid.uuid4().hex
        self._offered = False
        self._to_rank_0 = keys.rendezvous
        self._replies = MessageReader(client, keys.replies(self._call))

    def decision(self, *, chunks: int, version: int, base: int) -> Decision:
        """Offer a part; return what to stage of it.

        Raises:
            WeightError: Rank 0 did not reply in time, or failed.
            BeginAgainError: All ranks begin again.
        """
        self._post({"chunks": chunks, "version": version, "base": base})
        self._offered = True
        return unpack_decision(self._reply())

    def outcome(self, part: StagedPart) -> Decision | tuple[bytes, float]:
        """Report a staged part; return the committed version's manifest and time.

        Returns:
            The manifest and the time; or a new decision, of a rank 0 that was restarted meanwhile:
            the part has to be staged again.

        Raises:
            WeightError, BeginAgainError: As `decision` does.
        """
        self._post({"part": pack_part(part)})
        reply = self._reply_to(part.place.token)
        if isinstance(reply, Decision):
            return reply
        manifest, created_s = reply.get("manifest"), reply.get("created_s")
        if not isinstance(manifest, bytes) or not isinstance(created_s, float):
            raise DecodeError("rank 0's reply has no manifest")
        return manifest, created_s

    def token_used(self, token: int) -> Decision:
        """Report that another attempt has had the token of a decision; return a newer decision.

        Raises:
            WeightError, BeginAgainError: As `decision` does.
        """
        self._post({"used": token})
        reply = self._reply_to(token)
        if not isinstance(reply, Decision):
            raise DecodeError("rank 0 has published without the part of this rank")
        return reply

    def fail(self, error: BaseException) -> None:
        """Report to rank 0 that this call has failed."""
        self._post({"error": f"{type(error).__name__}: {error}", "offered": self._offered})

    def close(self) -> None:
        """Delete the replies."""
        self._replies.delete()

    def _post(self, message: dict[str, Any]) -> None:
        message = {**self._sender, "call": self._call, **message}
        post(self._client, [self._to_rank_0], message, expire_ms=EXPIRE_MS)

    def _reply_to(self, token: int) -> Decision | dict[str, Any]:
        """Return the outcome, or the decision of a rank 0 that was restarted after this token."""
        while "token" in (reply := self._reply()):
            decision = unpack_decision(reply)
            if decision.place.token > token:  # else the same one came twice
                return decision
        return reply

    def _reply(self) -> dict[str, Any]:
        reply = self._replies.next(time.monotonic() + self._timeout)
        if reply is None:
            raise WeightError(
                f"rank 0 did not answer rank {self._rank} within {self._timeout:g} s: check that "
                "it runs, and that it calls publish as often as this rank."
            )
        if reply.get("error") == BEGIN_AGAIN:
            raise BeginAgainError
        if "error" in reply:
            raise WeightError(f"no rank has published: {reply['error']!s:.500}")
        return reply


class RendezvousLeader:
    """Rank 0, over all its calls of `publish`."""

    def __init__(self, client: Client, keys: WeightKeys, world_size: int, timeout: float) -> None:
        self._client = client
        self._keys = keys
        self._messages = MessageReader(client, keys.rendezvous, containers=MAX_LISTS)
        self._others = range(1, world_size)
        self._timeout = timeout
        self._number = 0
        self._known: dict[int, tuple[str, int]] = {}  # rank -> publisher, its count at our 0
        self._missed: set[int] = set()  # ranks that did not come in time
        self._early: deque[dict[str, Any]] = deque()  # messages of later calls
        self._offers: dict[int, Offer] = {}

    def begin(self) -> None:
        """Begin a call of `publish`."""
        self._number += 1

    def offers(self) -> list[Offer]:
        """Return every other rank's offer, by rank.

        Raises:
            WeightError: A rank did not come in time, or failed.
        """
        deadline = time.monotonic() + self._timeout
        failed: dict[int, str] = {}
        early, self._early = self._early, deque()
        while missing := [r for r in self._others if r not in self._offers and r not in failed]:
            message = early.popleft() if early else self._next(deadline, missing)
            rank, calls_ahead = message["rank"], self._calls_ahead(message)
            if calls_ahead < 0:
                self._refuse(message)
            elif calls_ahead > 0:
                self._early.append(message)
                failed.setdefault(rank, "it has called publish more often than rank 0")
            elif "error" not in message:
                self._accept(message)
            else:
                # the other ranks are still waited for, so that all of them get the reply
                self._offers.pop(rank, None)
                failed[rank] = str(message["error"])
        self._early.extend(early)
        for rank, why in failed.items():
            raise WeightError(f"rank {rank}: {why:.500}")
        return [self._offers[rank] for rank in self._others]

    def decide(self, offer: Offer, decision: Decision) -> None:
        """Reply to a rank's offer with what it has to stage."""
        self._reply(offer.call, pack_decision(decision))

    def parts(self, decisions: dict[int, Decision]) -> list[StagedPart]:
        """Return the parts that the other ranks have staged, by rank.

        Raises:
            WeightError: A rank did not come in time, or failed.
            BeginAgainError: A rank has restarted.
            TokenUsedError: Another attempt has had the token of a rank.
        """
        deadline = time.monotonic() + self._timeout
        parts: dict[int, StagedPart] = {}
        while len(parts) < len(self._others):
            message = self._next(deadline, [r for r in self._others if r not in parts])
            rank, offer = message["rank"], self._offers[message["rank"]]
            place = decisions[rank].place
            calls_ahead = self._calls_ahead(message)
            if calls_ahead > 0:
                self._early.append(message)
                if "chunks" in message:
                    raise WeightError(f"rank {rank} has called publish again meanwhile.")
            elif calls_ahead < 0:
                continue  # a late message of an earlier call
            elif "error" in message:
                del self._offers[rank]
                raise WeightError(f"rank {rank}: {message['error']!s:.500}")
            elif "chunks" in message:
                if message["call"] != offer.call:  # a new process, or an offer that came twice
                    self._accept(message)
                    raise BeginAgainError
            elif message["call"] == offer.call:
                if message.get("used") == place.token:
                    raise TokenUsedError(f"rank {rank}: another attempt has had its token.")
                if token_of(message.get("part")) == place.token:
                    parts[rank] = unpack_part(message["part"], place)
        return [parts[rank] for rank in self._others]

    def end(self, reply: dict[str, Any]) -> None:
        """Send the outcome to all ranks that wait for it."""
        self._messages.delete_read()  # so that a restarted rank 0 does not read them again
        offers, self._offers = self._offers, {}
        for offer in offers.values():
            self._reply(offer.call, reply)

    def _calls_ahead(self, message: dict[str, Any]) -> int:
        """Return by how many calls a rank is ahead of rank 0; below 0 for an earlier call.

        The first call of a new process counts as the present one. If the rank was missed before,
        it counts as the missed call.
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
                "rank 0 did not wait for this call any longer and is at a later one. Publish the "
                "next version; with a larger timeout= rank 0 would wait longer."
            )
            self._reply(message["call"], {"error": why})

    def _accept(self, message: dict[str, Any]) -> None:
        offer = unpack_offer(message)
        if offer is not None:  # else it is a late message of an earlier attempt
            self._offers[offer.rank] = offer

    def _next(self, deadline: float, missing: list[int]) -> dict[str, Any]:
        """Return the next message whose sender is one of the other ranks."""
        while True:
            message = self._messages.next(deadline)
            if message is None:
                self._missed.update(missing)
                raise WeightError(
                    f"ranks {missing} did not come within {self._timeout:g} s: check that they "
                    "run, and that they call publish as often as rank 0."
                )
            names = [message.get("call"), message.get("publisher")]
            number, rank = message.get("number"), message.get("rank")
            if (
                all(isinstance(name, str) for name in names)
                and type(number) is int
                and rank in self._others
                and not self._is_of_earlier_process(message)
            ):
                return message

    def _is_of_earlier_process(self, message: dict[str, Any]) -> bool:
        """Whether a message cannot be the first one of a process, and its process is not known."""
        known = self._known.get(message["rank"])
        if known is not None and known[0] == message["publisher"]:
            return False
        return "chunks" not in message and message.get("offered") is not False

    def _reply(self, call: str, reply: dict[str, Any]) -> None:
        post(self._client, [self._keys.replies(call)], reply, expire_ms=EXPIRE_MS)
