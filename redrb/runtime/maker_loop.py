"""`MakerLoop`: the batches of a maker: rights, then weights, then groups, which are sent."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from redrb.connection.stop import Stop
from redrb.experience import Experience
from redrb.runtime.batch_rights import BatchRights, Granted, rows_of, split_rows
from redrb.runtime.experience_maker import ExperienceMaker
from redrb.runtime.graceful_sending import GracefulSender
from redrb.runtime.hooks import MakerHooks
from redrb.runtime.maker_weights import MakerWeights
from redrb.stream import ExperienceStream
from redrb.stream.sending import GroupedRows

_log = logging.getLogger("redrb")


class MakerLoop(MakerHooks):
    """Makes the groups of a batch of prompts and sends them.

    Attributes:
        name: Name of the maker.
        experience_maker: The object that turns prompts into experience.
        generate_kwargs: Options of generation.
    """

    name: str
    experience_maker: ExperienceMaker
    generate_kwargs: Mapping[str, Any]
    _weights: MakerWeights
    _rights: BatchRights | None
    _streams: Sequence[ExperienceStream]
    _graceful_sender: GracefulSender
    _stop: Stop
    _debug: bool

    def make_experience(self, inputs: Any) -> Experience:
        """Return the experience of a batch of prompts, made with the current weights.

        Raises:
            RecordError: The batch is neither a tensor, a dict of tensors nor a list.
        """
        rows_of(inputs)
        version, options = self._begin_batch()
        experience = self.experience_maker.make_experience(
            inputs, **{**self.generate_kwargs, **options}
        )
        self._note(experience, version)
        return experience

    def _begin_batch(self) -> tuple[int | None, dict[str, Any]]:
        """Return what `MakerWeights.begin_batch` does, and announce the version from now on."""
        version, options = self._weights.begin_batch()
        for stream in self._streams:
            stream.worker.weights_name = self._weights.trainer
            stream.worker.weight_version = version or 0
        return version, options

    def _note(self, experience: Experience, version: int | None) -> None:
        """Give samples without a weight version this one; announce the rewards."""
        given = experience.policy_version  # a list for a part of a batch, also if none is known
        if given is None:
            experience.policy_version = version  # the oldest: later tokens have newer weights
        elif not isinstance(given, int):
            experience.policy_version = [version if each is None else each for each in given]
        if experience.reward is not None:
            for stream in self._streams:
                stream.worker.metrics = {"reward": experience.reward.float().nanmean()}

    def _make_parts(self, inputs: Any) -> None:
        """Make the groups of a batch of prompts, as many at a time as there are rights for."""
        rest, left = inputs, True
        while left:
            rows, groups = rows_of(rest), self._groups_of(rest)
            rows_each = rows // groups if groups and rows % groups == 0 else 0
            with self._may_begin(groups, 1 if rows_each else groups) as granted:
                if self._stop:
                    return
                self._weights.refresh(granted.version)
                if self._stop:
                    return
                part, rest = split_rows(rest, granted.groups * rows_each or rows)
                left = rest is not None
                self._make_and_send(part, granted)

    def _groups_of(self, inputs: Any) -> int:
        """Return how many groups a batch of prompts becomes, at most."""
        count = getattr(self.experience_maker, "count_groups", rows_of)
        groups: int = count(inputs)
        return groups

    def _may_begin(self, groups: int, least: int) -> AbstractContextManager[Granted]:
        if self._rights is None:
            return nullcontext(Granted(groups, [None] * len(self._streams)))
        return self._rights.wait(groups, least)

    def _make_and_send(self, inputs: Any, granted: Granted) -> None:
        self._on_batch_start()
        for stream in self._streams:
            stream.worker.steps.begin()
        samples = groups = 0
        for experience in self._made(inputs):
            self._on_send_start()
            rows = GroupedRows(experience)
            groups += len(rows.rows())
            granted.check(groups, self.experience_maker)
            self._graceful_sender.send(rows, granted.each)
            self._on_send_end()
            samples += len(experience)
        for stream in self._streams:
            stream.worker.steps.end()
        self._on_batch_end()
        if self._debug:
            _log.info("maker %r made %d samples", self.name, samples)

    def _made(self, inputs: Any) -> Iterator[Experience]:
        """Yield the experience of a batch; groups that are ready later are other parts.

        Models are locked while the first part is made, and the others if models make them.
        """
        parts, exclusive = self._parts(inputs), self._weights.updates.exclusive
        with exclusive():
            self._on_make_experience_start()
            experience = next(parts, None)
            if experience is not None:
                self._on_make_experience_end(experience)
        uses_models = getattr(self.experience_maker, "parts_use_models", False)
        while experience is not None:
            yield experience
            with exclusive() if uses_models else nullcontext():
                experience = next(parts, None)
                if experience is not None:
                    self._on_make_experience_start()
                    self._on_make_experience_end(experience)

    def _parts(self, inputs: Any) -> Iterator[Experience]:
        if not getattr(self.experience_maker, "makes_parts", False):
            yield self.make_experience(inputs)
            return
        version, options = self._begin_batch()
        make_parts: Any = self.experience_maker.make_parts  # type: ignore[attr-defined]
        for experience in make_parts(inputs, **{**self.generate_kwargs, **options}):
            self._note(experience, version)
            yield experience
