"""`KVBatchMeta` and `BatchMeta`: the rows of a batch, by key and by number, without data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from redrb.compat.transfer_queue.absent import Absent
from redrb.compat.transfer_queue.process import check_process
from redrb.errors import ConfigError


class _Travels:
    """Base of what travels between processes: one that does not use redrb refuses it."""

    keys: list[str]

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_process()
        self.__dict__.update(state)


@dataclass
class KVBatchMeta(_Travels):
    """Rows of a partition, by key.

    Attributes:
        fields: Columns of the rows; None: all that they have.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ConfigError(
                f"keys and tags must have the same length, not {len(self.keys)} and "
                f"{len(self.tags)}: give the tags of each row."
            )
        for name, values in (("keys", self.keys), ("fields", self.fields or ())):
            if len(set(values)) < len(values):
                raise ConfigError(f"{name} has a name twice: give each once.")
        self.tags = copy.deepcopy(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    def __str__(self) -> str:
        return (
            f"KVBatchMeta(size={self.size}, field_names={self.fields}, "
            f"extra_info={self.extra_info})"
        )

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """Return the batch of some of the rows, in the order of `keys_to_select`."""
        places = {key: place for place, key in enumerate(self.keys)}
        unknown = [key for key in keys_to_select if key not in places]
        if unknown:
            raise ConfigError(f"keys {unknown[:5]} were not found in this batch: give keys of it.")
        return self._with([places[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Put the rows into another order: row `indexes[i]` comes to place i."""
        if sorted(indexes) != list(range(self.size)):
            raise ConfigError(f"the order must have each number from 0 to {self.size - 1} once.")
        self.tags = [self.tags[place] for place in indexes]  # first: `Written` reads them by key
        self.keys = [self.keys[place] for place in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Return `chunks` batches of consecutive rows; the first ones may have one row more."""
        return [self._with(places) for places in _parts(self.size, chunks)]

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Return the batch of all rows of batches that have the same partition and columns."""
        data = [each for each in data if len(each)]
        if not data:
            return KVBatchMeta()
        first = data[0]
        for each in data:
            if set(each.fields or ()) != set(first.fields or ()):
                raise ConfigError(
                    f"batches with other fields cannot be joined: {first.fields}, {each.fields}."
                )
            if each.partition_id != first.partition_id:
                raise ConfigError(
                    "batches of several partitions cannot be joined: "
                    f"{first.partition_id}, {each.partition_id}."
                )
        return KVBatchMeta(
            keys=[key for each in data for key in each.keys],
            tags=[tags for each in data for tags in each.tags],
            partition_id=first.partition_id,
            fields=first.fields,
            extra_info=_merged(each.extra_info or {} for each in data),
        )

    def _with(self, places: Iterable[int]) -> KVBatchMeta:
        places = list(places)
        return KVBatchMeta(
            keys=[self.keys[place] for place in places],
            tags=[self.tags[place] for place in places],
            partition_id=self.partition_id,
            fields=self.fields,
            extra_info=self.extra_info,
        )


class Written(KVBatchMeta):
    """The rows of a put. Their tags and columns are read from Redis when somebody asks for them."""

    def __init__(
        self,
        keys: Sequence[str],
        partition_id: str,
        read: Callable[[Sequence[str]], tuple[list[dict[str, Any]], list[str]]],
    ) -> None:
        self.keys, self.partition_id, self.extra_info = list(keys), partition_id, {}
        self._read = read

    @cached_property
    def _found(self) -> tuple[list[dict[str, Any]], list[str]]:
        return self._read(self.keys)

    @cached_property
    def tags(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Tags of each row."""
        return self._found[0]

    @cached_property
    def fields(self) -> list[str] | None:  # type: ignore[override]
        """Columns of the rows."""
        return self._found[1]

    def __eq__(self, other: object) -> bool:
        """Return whether another put has written the same rows."""
        if not isinstance(other, Written):
            return NotImplemented
        return (self.keys, self.partition_id, self.extra_info) == (
            other.keys,
            other.partition_id,
            other.extra_info,
        )

    def __repr__(self) -> str:
        return f"KVBatchMeta(keys={self.keys}, partition_id={self.partition_id!r})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a KVBatchMeta, with tags and columns of now."""
        names = ("keys", "tags", "partition_id", "fields", "extra_info")
        state = {name: getattr(self, name) for name in names}
        return KVBatchMeta, (), state


class BatchMeta(_Travels, Absent):
    """Rows of a partition, by number, and their columns.

    Attributes:
        global_indexes: Number of each row, which no other row of its partition ever gets.
        field_names: The columns, sorted.
    """

    def __init__(
        self,
        global_indexes: Iterable[int] = (),
        partition_ids: Iterable[str] = (),
        field_names: Iterable[str] = (),
        extra_info: dict[str, Any] | None = None,
        *,
        keys: Iterable[str] = (),
    ) -> None:
        self.global_indexes, self.partition_ids = list(global_indexes), list(partition_ids)
        self.keys = list(keys)
        if not len(self.global_indexes) == len(self.partition_ids) == len(self.keys):
            raise ConfigError(
                f"{len(self.global_indexes)} global_indexes, {len(self.partition_ids)} "
                f"partition_ids and {len(self.keys)} keys: async_kv_retrieve_meta makes batches."
            )
        self.field_names = sorted(field_names)
        self.extra_info: dict[str, Any] = dict(extra_info or {})

    @property
    def is_ready(self) -> bool:
        """Whether there are rows, all of which have the columns."""
        return self.size > 0

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """Return the batch of the rows at these places."""
        if any(not 0 <= place < self.size for place in sample_indices):
            raise ConfigError(f"sample_indices must be places from 0 to {self.size - 1}.")
        return BatchMeta(
            (self.global_indexes[place] for place in sample_indices),
            (self.partition_ids[place] for place in sample_indices),
            self.field_names,
            copy.deepcopy(self.extra_info),
            keys=(self.keys[place] for place in sample_indices),
        )

    def select_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """Return the same rows with those of the columns that they have."""
        selected = self.copy()
        selected.field_names = sorted(set(self.field_names) & set(field_names))
        return selected

    def copy(self) -> BatchMeta:
        """Return a copy that shares nothing with this one."""
        return self.select_samples(range(self.size))

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Return `chunks` batches of consecutive rows; the first ones may have one row more."""
        return [self.select_samples(places) for places in _parts(self.size, chunks)]

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:  # noqa: FBT001
        """Return the batch of all rows of batches that have the same columns."""
        data = [each for each in data if len(each)]
        if not data:
            return cls()
        other = next((each for each in data if each.field_names != data[0].field_names), None)
        if validate and other is not None:
            raise ConfigError(
                "batches with other fields cannot be joined: "
                f"{data[0].field_names}, {other.field_names}."
            )
        return cls(
            (number for each in data for number in each.global_indexes),
            (partition for each in data for partition in each.partition_ids),
            data[0].field_names,
            _merged(each.extra_info for each in data),
            keys=(key for each in data for key in each.keys),
        )

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """Return a batch without rows."""
        return cls(extra_info=extra_info)


def _parts(size: int, chunks: int) -> list[range]:
    """Return the places of `chunks` parts, which differ by one row at most."""
    base, longer = divmod(size, chunks)
    ends = [base * part + min(part, longer) for part in range(chunks + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def _merged(infos: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts of several batches, which must not contradict each other."""
    merged: dict[str, Any] = {}
    for info in infos:
        for name, value in info.items():
            if name in merged and not _same(merged[name], value):
                raise ConfigError(f"batches with other values of extra_info[{name!r}] were joined.")
            merged[name] = value
    return merged


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(np.all(one == other))
