"""`get_client`: the methods of TransferQueue's client that verl calls, by numbers of rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tensordict import TensorDict

from redrb.compat.transfer_queue.absent import Absent
from redrb.compat.transfer_queue.interface import get_columns, known, kv_batch_put
from redrb.compat.transfer_queue.metadata import BatchMeta
from redrb.compat.transfer_queue.session import opened
from redrb.compat.transfer_queue.values import Parser
from redrb.errors import ConfigError


class TransferQueueClient(Absent):
    """The methods of TransferQueue's client that verl calls; others raise ConfigError."""

    async def async_kv_retrieve_meta(
        self,
        keys: Sequence[str] | str,
        partition_id: str,
        create: bool = False,  # noqa: FBT001
    ) -> BatchMeta:
        """Return the numbers of rows, and the columns that all of them have."""
        if create:
            raise ConfigError("create=True: kv_batch_put makes the rows that are missing.")
        keys = [keys] if isinstance(keys, str) else list(keys)
        return await asyncio.to_thread(_retrieve_meta, keys, partition_id)

    async def async_kv_retrieve_keys(
        self, global_indexes: Sequence[int] | int, partition_id: str
    ) -> list[str]:
        """Return the keys of rows by number."""
        numbers = [global_indexes] if isinstance(global_indexes, int) else list(global_indexes)
        return await asyncio.to_thread(_retrieve_keys, numbers, partition_id)

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        """Return the columns of the rows of a batch."""
        if not metadata.size or not metadata.field_names:
            return TensorDict({}, batch_size=0)
        return await asyncio.to_thread(_get_data, metadata)

    async def async_put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,  # noqa: ARG002
        data_parser: Parser | None = None,
    ) -> BatchMeta:
        """Add columns to the rows of a batch; returns it with these columns."""
        if not metadata:
            raise ConfigError("async_put needs the rows: give metadata, or call kv_batch_put.")
        return await asyncio.to_thread(_put, data, metadata, data_parser)


def get_client() -> TransferQueueClient:
    """Return the client with the methods that verl calls."""
    opened()
    return TransferQueueClient()


def _retrieve_meta(keys: list[str], partition_id: str) -> BatchMeta:
    partition = known(keys, partition_id)
    numbers = partition.table.numbers(keys)
    missing = [key for key, number in zip(keys, numbers, strict=True) if number is None]
    if missing:
        raise ConfigError(f"keys {missing[:5]} were not found in partition {partition_id!r}.")
    return BatchMeta(
        [number for number in numbers if number is not None],
        [partition_id] * len(keys),
        partition.columns(keys),
        keys=keys,
    )


def _retrieve_keys(numbers: list[int], partition_id: str) -> list[str]:
    found = known(numbers, partition_id).table.keys_of(numbers)
    missing = [number for number, key in zip(numbers, found, strict=True) if key is None]
    if missing:
        raise ConfigError(
            f"global_indexes {missing[:5]} were not found in partition {partition_id!r}."
        )
    return [key for key in found if key is not None]


def _partition_of(meta: BatchMeta) -> str:
    if len(set(meta.partition_ids)) != 1:
        raise ConfigError("the batch has rows of several partitions: handle each one by itself.")
    return meta.partition_ids[0]


def _get_data(meta: BatchMeta) -> TensorDict:
    partition = known(meta.keys, _partition_of(meta))
    return get_columns(partition, meta.keys, meta.field_names)


def _put(data: TensorDict, meta: BatchMeta, parser: Parser | None) -> BatchMeta:
    kv_batch_put(meta.keys, _partition_of(meta), data, data_parser=parser)
    written = meta.copy()
    written.field_names = sorted({*meta.field_names, *map(str, data.keys())})
    return written
