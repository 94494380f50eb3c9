"""From the items of a put to a `PutBatch`: checked once, filtered, encoded, indexed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec.structs import replace
from torch import Tensor

from redrb.codec import EncodedGroup, check_and_encode_groups
from redrb.connection.transport import SURE_BYTES
from redrb.errors import ConfigError, EncodeError, RecordError, RedrbError, StoreUnavailable
from redrb.experience import BufferItem, Experience, split_experience_batch
from redrb.experience.batching import lengths_of, padded_rows
from redrb.experience.checking import check_groups
from redrb.stream.orders import ByAdmission, Order, ignores_priority
from redrb.stream.put.batch import NO_VALUES, PutBatch, index_values, reads_samples
from redrb.stream.put.filters import Filter, passing
from redrb.stream.put.options import PutOptions
from redrb.stream.put.refusals import (
    OnBadGroup,
    check_versions,
    common_kind,
    log_dropped,
    misfit_errors,
    name_row,
    unpublished_error,
)
from redrb.stream.task.description import TaskDescription
from redrb.stream.task.task import Task

Items: TypeAlias = BufferItem | Sequence[BufferItem] | Experience
"""The items that `put` takes."""

Groups: TypeAlias = list[list[BufferItem]] | Experience
"""Groups of samples; the rows of an Experience are one group each."""

_NO_LISTS = (str, bytes, Mapping, Tensor)
"""Iterable types that are no list of samples."""


def groups_of(items: Items) -> Groups:
    """Return the groups of a `put`: a list of samples is one, an Experience one a row."""
    if isinstance(items, BufferItem):
        return [[items]]
    if isinstance(items, Experience):
        return items
    group = as_list(items, "samples")
    return [group] if group else []


def groups_of_many(groups: Sequence[Sequence[BufferItem]]) -> list[list[BufferItem]]:
    """Return the groups of a `put_many`; raises as `groups_of` does."""
    return [as_list(group, "samples") for group in as_list(groups, "lists of samples")]


def as_list(items: object, content: str) -> list[Any]:
    """Return any iterable as a list; raises RecordError for types that are no list of samples."""
    if isinstance(items, list):
        return items
    if isinstance(items, _NO_LISTS) or not isinstance(items, Iterable):
        raise RecordError(
            f"a {type(items).__name__} where a list of {content} is needed: put takes a "
            "redrb.BufferItem, a list of them or a redrb.Experience, put_many a list of such lists."
        )
    return list(items)


_log = logging.getLogger("redrb")


@dataclass(slots=True)
class _Sorted:
    """The groups of a put, sorted into those to store, those filtered and those refused."""

    places: Sequence[int]  # index in the put of each group to store
    encoded: list[EncodedGroup]
    samples: Sequence[Sequence[BufferItem]]  # of these groups, where they are needed
    filtered: int = 0
    refused: dict[int, RedrbError] = field(default_factory=dict)  # by index in the put

    def refuse(self, errors: dict[int, RecordError]) -> None:
        """Move groups, by their index in the put, to the refused ones."""
        if not errors:
            return
        kept = [number for number, place in enumerate(self.places) if place not in errors]
        self.places = [self.places[number] for number in kept]
        self.encoded = [self.encoded[number] for number in kept]
        self.samples = [self.samples[number] for number in kept] if self.samples else []
        self.refused.update(errors)


@dataclass(eq=False, repr=False)
class Preparer:
    """Prepares groups for one task; safe among threads."""

    _task: Task
    _filters: Sequence[Filter]
    _checks: frozenset[str]
    _on_bad_group: OnBadGroup
    _warned: bool = False

    def prepare(self, groups: Groups, options: PutOptions) -> PutBatch:
        """Check, filter and encode groups, and take the values from them that the task indexes.

        A bad group does not keep the others from being prepared: `refused` of the result has its
        error, unless bad groups are to be dropped.

        Raises:
            RecordError: A batch is malformed as a whole.
            ConfigError: A tag of `options` is not declared, a filter is broken, or rights of
                admission are missing.
        """
        description = self._described(options)
        try:
            batch = self._prepare(groups, options, description, one_by_one=False)
        except (RecordError, EncodeError):  # find out which groups are bad
            batch = self._prepare(groups, options, description, one_by_one=True)
        if batch.refused and self._on_bad_group == "drop":
            log_dropped(self._task.name, batch.refused.values())
            filtered = batch.filtered + len(batch.refused)
            batch = replace(batch, filtered=filtered, refused={})
        return self._admitted(batch, description.order)

    def prepare_part(self, groups: Groups, options: PutOptions) -> PutBatch:
        """Check and encode one part of a group, which uses no right and passes no filter.

        Raises:
            RecordError, EncodeError: The part is bad, or is no single group of samples.
            ConfigError: A tag of `options` is not declared.
        """
        description = self._described(options)
        batch = self._prepare(groups, options, description, one_by_one=False)
        batch.raise_refused()
        if len(batch.groups) != 1:
            raise RecordError(
                f"a part of a group is a sample or a list of samples, not {len(batch.groups)} "
                "groups: call put_part for each part."
            )
        return batch

    def _described(self, options: PutOptions) -> TaskDescription:
        """Return the settings of the task, with all tags of `options` if they are declared."""
        description = self._task.description
        if options.tags and not options.tags.keys() <= set(description.tags):
            self._task.reopen()  # another process may have declared these tags since
            description = self._task.description
        if options.priority is not None:
            self._warn_of_priorities(description)
        return description

    def _prepare(
        self, groups: Groups, options: PutOptions, description: TaskDescription, *, one_by_one: bool
    ) -> PutBatch:
        """Prepare all groups at once, which raises for a bad one, or one by one."""
        reads = reads_samples(description, options)
        if one_by_one:
            found = self._each(groups, options, description, reads=reads)
        elif isinstance(groups, Experience) and not (self._filters or lengths_of(groups.tensors)):
            rows = [[row] for row in padded_rows(groups)]
            found = self._all(rows, 0, options, description)
        else:
            items = _as_lists(groups)
            found = self._all(items, 0, options, description)
        if options.status is not None:
            found.encoded = [group._replace(status=options.status) for group in found.encoded]
        kind = ""
        if "fields" in self._checks:
            kind = description.kind or common_kind(found.encoded)
            if any(group.kind != kind for group in found.encoded):
                misfits = misfit_errors(found.places, found.encoded, kind)
                if misfits and description.kind and self._was_created_anew():
                    kind = self._task.description.kind or common_kind(found.encoded)
                    misfits = misfit_errors(found.places, found.encoded, kind)
                found.refuse(misfits)
        if self._task.weights and "versions" in self._checks:
            found.refuse(self._unpublished(found, options.policy_version))
        if isinstance(groups, Experience):
            for row, error in found.refused.items():
                name_row(error, row)
        values = index_values(description, found.samples, options) if reads else NO_VALUES
        return PutBatch(
            found.encoded,
            description.revision,
            options,
            values,
            found.filtered,
            refused=dict(sorted(found.refused.items())) if found.refused else {},
            kind=kind,
            versions="versions" in self._checks and options.policy_version is None,
            sources=options.sources.keeping(found.places),
        )

    def _each(
        self, groups: Groups, options: PutOptions, description: TaskDescription, *, reads: bool
    ) -> _Sorted:
        parts: list[_Sorted] = []
        refused: dict[int, RedrbError] = {}
        for place, group in enumerate(_as_lists(groups)):
            try:
                part = self._all([group], place, options, description)
                if reads:
                    index_values(description, part.samples, options)
            except (RecordError, EncodeError) as error:
                refused[place] = error
                continue
            parts.append(part)
        return _Sorted(
            [place for part in parts for place in part.places],
            [group for part in parts for group in part.encoded],
            [samples for part in parts for samples in part.samples],
            sum(part.filtered for part in parts),
            refused,
        )

    def _all(
        self,
        groups: list[list[BufferItem]],
        first: int,
        options: PutOptions,
        description: TaskDescription,
    ) -> _Sorted:
        """Prepare groups, the first of which has this index in the put; raises for a bad one."""
        places: Sequence[int] = range(first, first + len(groups))
        filtered = 0
        if self._filters:
            bad_rewards = check_groups(groups, first)
            kept = passing(groups, self._filters)
            for number in kept:
                if number in bad_rewards:
                    raise bad_rewards[number]
            filtered = len(groups) - len(kept)
            groups, places = [groups[number] for number in kept], [places[each] for each in kept]
        encoded = check_and_encode_groups(
            groups,
            policy_version=options.policy_version,
            values="values" in self._checks,
            alike="fields" in self._checks,
            first=first,
        )
        for place, one in zip(places, encoded, strict=True):
            if one.nbytes > SURE_BYTES:
                self._task.store.client.check_size(
                    one.nbytes, f"group {place} of this put", "put smaller groups, or "
                )
        needs_versions = "versions" in self._checks and options.policy_version is None
        if needs_versions and description.staleness.any:
            for place, group in zip(places, groups, strict=True):
                check_versions(group, place)
        return _Sorted(places, encoded, groups, filtered)

    def _unpublished(self, found: _Sorted, default: int | None) -> dict[int, RecordError]:
        """Return the error for each group of weights that are not published yet, by its place."""
        newest = [-1 if group.newest is None else group.newest for group in found.encoded]
        task = self._task
        if task.is_published(max(newest, default=-1)):
            return {}
        return {
            place: unpublished_error(group, default, task.newest, task.weights, place)
            for place, group, version in zip(found.places, found.samples, newest, strict=True)
            if version > task.newest
        }

    def _was_created_anew(self) -> bool:
        """Look whether the task is another one by now, which does not know the old one's fields."""
        before = self._task.description.incarnation
        with suppress(StoreUnavailable):  # the fields that are known decide while Redis is away
            self._task.reopen()
        return self._task.description.incarnation != before

    def _admitted(self, batch: PutBatch, order: Order | None) -> PutBatch:
        """Give each group a right, and let the rights of other groups return."""
        source, groups = batch.options.admission, len(batch.groups)
        if source is None:
            if groups and isinstance(order, ByAdmission):
                raise ConfigError(
                    f"task {self._task.name!r} orders groups by their rights: put them with "
                    "admission=, the rights that stream.admit() returned."
                )
            return batch
        if source.task_prefix != self._task.store.keys.prefix:
            raise ConfigError(
                f"task {self._task.name!r}: admission= has rights of task {source.task!r}: use "
                "those that admit() of this stream returned."
            )
        rights = source.hand_over(groups + batch.filtered + len(batch.refused))
        return replace(batch, rights=rights.returning_from(groups))

    def _warn_of_priorities(self, description: TaskDescription) -> None:
        """Warn, once, that the task's order does not look at priorities."""
        if self._warned or not ignores_priority(description.order):
            return
        self._warned = True
        _log.warning(
            "task %r: priorities are stored, but its order does not go by them: open it with "
            'order="priority" or "prioritized", or put without priority=',
            self._task.name,
        )


def _as_lists(groups: Groups) -> list[list[BufferItem]]:
    if isinstance(groups, Experience):
        return [[item] for item in split_experience_batch(groups)]
    return groups
