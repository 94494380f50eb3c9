"""One version from all ranks: each stages its own shards, rank 0 commits."""

from __future__ import annotations

import contextlib
import logging
import uuid
from typing import Protocol

from redrb.connection import Client
from redrb.errors import ConfigError, StoreError, WeightError
from redrb.keys import WeightKeys
from redrb.weights.publishing.baseline import Baseline
from redrb.weights.publishing.committer import BegunVersion, Committer
from redrb.weights.publishing.manifest_assembly import assemble_manifest
from redrb.weights.publishing.rank_rendezvous import (
    AGAIN,
    BeginAgainError,
    Decision,
    Offer,
    RendezvousLeader,
    RendezvousMember,
)
from redrb.weights.publishing.staging import StagingAttempt, StagingPlace
from redrb.weights.tensors.state import State
from redrb.weights.wire.manifest import Manifest, WeightVersion
from redrb.weights.wire.manifest_codec import decode_manifest, encode_manifest

_log = logging.getLogger("redrb")

_ATTEMPTS = 3


class RankPublisher(Protocol):
    """One rank's side."""

    def give_up(self, error: Exception) -> None:
        """Let the others know that this rank publishes nothing."""

    def publish(self, source: State, version: int | None) -> WeightVersion:
        """Publish a version together with all other ranks."""


class LeadingRank:
    """Rank 0's side."""

    def __init__(
        self,
        client: Client,
        keys: WeightKeys,
        issuer: Committer,
        memory: Baseline,
        *,
        world_size: int,
        timeout: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._issuer = issuer
        self._memory = memory
        self._timeout = timeout
        self._host = RendezvousLeader(client, keys, world_size, timeout)

    def publish(self, source: State, version: int | None) -> WeightVersion:
        """Publish a version together with all other ranks."""
        self._host.begin()
        for _ in range(_ATTEMPTS):
            try:
                published, manifest = self._attempt(source, version)
            except BeginAgainError:
                self._host.end({"error": AGAIN})
                continue
            except BaseException as error:
                with contextlib.suppress(StoreError):
                    self._host.end({"error": f"rank 0: {type(error).__name__}: {error}"})
                raise
            told = {"manifest": encode_manifest(manifest), "created_s": published.created_s}
            try:
                self._host.end(told)
            except StoreError as error:  # the version is out; they wait for their timeout
                _log.warning("not every rank knows version %d: %s", published.version, error)
            return published
        raise WeightError("ranks came anew, or chunks were gone, each time: publish again.")

    def give_up(self, error: Exception) -> None:
        """Let the others know that this rank publishes nothing."""
        self._host.begin()
        with contextlib.suppress(StoreError):
            with contextlib.suppress(WeightError):
                self._host.offers()
            self._host.end({"error": f"rank 0: {type(error).__name__}: {error}"})

    def _attempt(self, source: State, version: int | None) -> tuple[WeightVersion, Manifest]:
        memory = self._memory
        offers = self._host.offers()
        begun = self._issuer.begin(version, ranks=1 + len(offers))
        for offer in offers:
            if offer.version not in (0, begun.version):
                raise ConfigError(
                    f"rank {offer.rank} publishes version {offer.version}, rank 0 version "
                    f"{begun.version}: give all the same, or none."
                )
        difference = memory.difference(source, begun.newest_state)
        bases = {offer.base for offer in offers}
        if difference is None or bases != {difference.base}:
            difference = None
        whole = difference is None or memory.anchor_due
        decisions = self._decide(begun, source, offers, whole=whole, delta=difference is not None)
        place = StagingPlace(begun.version, begun.token, 0, self._issuer.spread)
        attempt = StagingAttempt(self._client, self._keys, place, source, waits_s=self._timeout)
        try:
            part = attempt.stage(difference, whole=whole, anchor=memory.anchor)
            parts = [part, *self._host.parts(decisions)]
            manifest = assemble_manifest(
                parts,
                kind="full" if whole else "delta",
                base=difference.base if difference is not None else 0,
                before=memory.checksums if difference is not None else (),
            )
            published = self._issuer.commit(begun, manifest)
        except BaseException:
            self._issuer.discard(attempt)
            raise
        if published is None:
            self._issuer.discard(attempt)
            memory.forget()
            raise BeginAgainError
        memory.advance(manifest, source, part, difference)
        return published, manifest

    def _decide(
        self, begun: BegunVersion, source: State, offers: list[Offer], *, whole: bool, delta: bool
    ) -> dict[int, Decision]:
        """Give each rank its place after those before it."""
        decisions: dict[int, Decision] = {}
        first = source.layout.chunks
        for offer in offers:
            place = StagingPlace(
                begun.version, begun.token - offer.rank, first, self._issuer.spread
            )
            decisions[offer.rank] = Decision(place, whole, delta)
            self._host.decide(offer, decisions[offer.rank])
            first += offer.chunks
        return decisions


class FollowingRank:
    """The side of every other rank."""

    def __init__(
        self,
        client: Client,
        keys: WeightKeys,
        issuer: Committer,
        memory: Baseline,
        *,
        name: str,
        rank: int,
        timeout: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._issuer = issuer
        self._memory = memory
        self._name = name
        self._rank = rank
        self._timeout = timeout
        self._publisher = uuid.uuid4().hex
        self._number = 0

    def publish(self, source: State, version: int | None) -> WeightVersion:
        """Publish a version together with all other ranks."""
        self._number += 1
        for _ in range(_ATTEMPTS):
            guest = self._guest()
            try:
                return self._attempt(guest, source, version)
            except BeginAgainError:
                self._memory.forget()
            except BaseException as error:
                with contextlib.suppress(StoreError):
                    guest.fail(error)
                raise
            finally:
                with contextlib.suppress(StoreError):  # what is left of it expires
                    guest.close()
        raise WeightError("ranks came anew, or chunks were gone, each time: publish again.")

    def give_up(self, error: Exception) -> None:
        """Let the others know that this rank publishes nothing."""
        self._number += 1
        with contextlib.suppress(StoreError):
            self._guest().fail(error)

    def _guest(self) -> RendezvousMember:
        return RendezvousMember(
            *(self._client, self._keys, self._rank, self._timeout),
            publisher=self._publisher,
            number=self._number,
        )

    def _attempt(
        self, guest: RendezvousMember, source: State, version: int | None
    ) -> WeightVersion:
        memory = self._memory
        difference = memory.difference(source, memory.version)
        base = difference.base if difference is not None else 0
        decision = guest.decision(chunks=source.layout.chunks, version=version or 0, base=base)
        difference = difference if decision.delta else None
        attempt = StagingAttempt(
            *(self._client, self._keys, decision.place, source), waits_s=self._timeout
        )
        try:
            part = attempt.stage(difference, whole=decision.whole, anchor=memory.anchor)
            stored, created_s = guest.outcome(part)
            manifest = decode_manifest(stored)
        except BaseException:
            self._issuer.discard(attempt)
            raise
        memory.advance(manifest, source, part, difference)
        return manifest.describe(self._name, created_s)
