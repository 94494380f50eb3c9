"""One version from all ranks: each rank stages its shards, rank 0 commits the version."""

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
from redrb.weights.publishing.rank_messages import BEGIN_AGAIN, BeginAgainError, Decision, Offer
from redrb.weights.publishing.rank_rendezvous import RendezvousLeader, RendezvousMember
from redrb.weights.publishing.staging import StagingAttempt, StagingPlace, TokenUsedError
from redrb.weights.tensors.state import State
from redrb.weights.wire.manifest import Manifest, WeightVersion
from redrb.weights.wire.manifest_codec import decode_manifest, encode_manifest

_log = logging.getLogger("redrb")

_ATTEMPTS = 3


class RankPublisher(Protocol):
    """A rank that publishes versions together with all other ranks."""

    def give_up(self, error: Exception) -> None:
        """Report an error to the other ranks, in place of a call of `publish`."""

    def publish(self, source: State, version: int | None) -> WeightVersion:
        """Publish a version together with all other ranks."""


class LeadingRank:
    """Rank 0: collects the offers, decides, and commits the version."""

    def __init__(
        self,
        client: Client,
        keys: WeightKeys,
        committer: Committer,
        baseline: Baseline,
        *,
        name: str,
        world_size: int,
        timeout: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._committer = committer
        self._baseline = baseline
        self._name = name
        self._timeout = timeout
        self._rendezvous = RendezvousLeader(client, keys, world_size, timeout)

    def publish(self, source: State, version: int | None) -> WeightVersion:
        """Publish a version together with all other ranks."""
        self._rendezvous.begin()
        for _ in range(_ATTEMPTS):
            try:
                published, manifest = self._attempt(source, version)
            except BeginAgainError:
                self._rendezvous.end({"error": BEGIN_AGAIN})
                continue
            except BaseException as error:
                with contextlib.suppress(StoreError):
                    self._rendezvous.end({"error": f"rank 0: {type(error).__name__}: {error}"})
                raise
            outcome = {"manifest": encode_manifest(manifest), "created_s": published.created_s}
            try:
                self._rendezvous.end(outcome)
            except StoreError as error:  # committed; the other ranks wait for their timeout
                _log.warning(
                    "version %d is published, but not every rank has learned of it: %s",
                    published.version,
                    error,
                )
            return published
        raise WeightError(
            f"weights {self._name!r}: in each of {_ATTEMPTS} attempts a rank restarted or chunks "
            "were gone: publish again."
        )

    def give_up(self, error: Exception) -> None:
        """Report an error to the other ranks, in place of a call of `publish`."""
        self._rendezvous.begin()
        with contextlib.suppress(StoreError):
            with contextlib.suppress(WeightError):
                self._rendezvous.offers()
            self._rendezvous.end({"error": f"rank 0: {type(error).__name__}: {error}"})

    def _attempt(self, source: State, version: int | None) -> tuple[WeightVersion, Manifest]:
        baseline = self._baseline
        offers = self._rendezvous.offers()
        begun = self._committer.begin(version, ranks=1 + len(offers))
        for offer in offers:
            if offer.version not in (0, begun.version):
                raise ConfigError(
                    f"rank {offer.rank} publishes version {offer.version}, rank 0 version "
                    f"{begun.version}: give the same version= on all ranks, or none."
                )
        difference = baseline.difference(source, begun.newest_state)
        bases = {offer.base for offer in offers}
        if difference is None or bases != {difference.base}:
            difference = None
        whole = baseline.stores_in_full(difference)
        decisions = self._decide(begun, source, offers, whole=whole, delta=difference is not None)
        place = StagingPlace(begun.version, begun.token, 0, self._committer.spread)
        attempt = StagingAttempt(self._client, self._keys, place, source, waits_s=self._timeout)
        try:
            part = attempt.stage(difference, whole=whole, anchor=baseline.anchor)
            parts = [part, *self._rendezvous.parts(decisions)]
            manifest = assemble_manifest(
                parts,
                kind="full" if whole else "delta",
                base=difference.base if difference is not None else 0,
                before=baseline.checksums if difference is not None else (),
            )
            published = self._committer.commit(begun, manifest)
        except TokenUsedError:
            self._committer.skip_tokens()
            published = None
        except BaseException:
            self._committer.discard(attempt)
            raise
        if published is None:
            self._committer.discard(attempt)
            baseline.forget()
            raise BeginAgainError
        baseline.advance(manifest, source, part, difference)
        return published, manifest

    def _decide(
        self, begun: BegunVersion, source: State, offers: list[Offer], *, whole: bool, delta: bool
    ) -> dict[int, Decision]:
        """Send each rank its place: after the chunks of the ranks before it."""
        decisions: dict[int, Decision] = {}
        first = source.layout.chunks
        for offer in offers:
            place = StagingPlace(
                begun.version, begun.token - offer.rank, first, self._committer.spread
            )
            decisions[offer.rank] = Decision(place, whole, delta)
            self._rendezvous.decide(offer, decisions[offer.rank])
            first += offer.chunks
        return decisions


class FollowingRank:
    """Every rank but 0: offers its part, stages it, and waits for the outcome."""

    def __init__(
        self,
        client: Client,
        keys: WeightKeys,
        committer: Committer,
        baseline: Baseline,
        *,
        name: str,
        rank: int,
        timeout: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._committer = committer
        self._baseline = baseline
        self._name = name
        self._rank = rank
        self._timeout = timeout
        self._publisher = uuid.uuid4().hex
        self._number = 0

    def publish(self, source: State, version: int | None) -> WeightVersion:
        """Publish a version together with all other ranks."""
        self._number += 1
        for _ in range(_ATTEMPTS):
            member = self._member()
            try:
                return self._attempt(member, source, version)
            except BeginAgainError:
                self._baseline.forget()
            except BaseException as error:
                with contextlib.suppress(StoreError):
                    member.fail(error)
                raise
            finally:
                with contextlib.suppress(StoreError):  # the replies expire
                    member.close()
        raise WeightError(
            f"weights {self._name!r}: in each of {_ATTEMPTS} attempts a rank restarted or chunks "
            "were gone: publish again."
        )

    def give_up(self, error: Exception) -> None:
        """Report an error to the other ranks, in place of a call of `publish`."""
        self._number += 1
        with contextlib.suppress(StoreError):
            self._member().fail(error)

    def _member(self) -> RendezvousMember:
        return RendezvousMember(
            *(self._client, self._keys, self._rank, self._timeout),
            publisher=self._publisher,
            number=self._number,
        )

    def _attempt(
        self, member: RendezvousMember, source: State, version: int | None
    ) -> WeightVersion:
        baseline = self._baseline
        difference = baseline.difference(source, baseline.version)
        base = difference.base if difference is not None else 0
        decision = member.decision(chunks=source.layout.chunks, version=version or 0, base=base)
        while True:
            staged = difference if decision.delta else None
            attempt = StagingAttempt(
                *(self._client, self._keys, decision.place, source), waits_s=self._timeout
            )
            try:
                outcome: Decision | tuple[bytes, float]
                try:
                    part = attempt.stage(staged, whole=decision.whole, anchor=baseline.anchor)
                except TokenUsedError:
                    outcome = member.token_used(decision.place.token)
                else:
                    outcome = member.outcome(part)
                if not isinstance(outcome, Decision):
                    stored, created_s = outcome
                    manifest = decode_manifest(stored)
                    break
            except BaseException:
                self._committer.discard(attempt, of_rank=True)
                raise
            self._committer.discard(
                attempt, of_rank=True
            )  # rank 0 was restarted, and has decided anew
            decision = outcome
        baseline.advance(manifest, source, part, staged)
        return manifest.describe(self._name, created_s)
