"""The functions kv_* of the package transfer_queue, on redrb."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDict

from redrb.compat.transfer_queue.metadata import KVBatchMeta, Written
from redrb.compat.transfer_queue.queue import Partition
from redrb.compat.transfer_queue.session import opened
from redrb.compat.transfer_queue.values import Parser, one_row, to_columns, to_tensordict
from redrb.errors import ConfigError, MissingRows


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | Mapping[str, Any] | None = None,
    tag: Mapping[str, Any] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Put one row: `kv_batch_put` of one key.

    Args:
        fields: A TensorDict of one row, or values without the dimension of rows.
    """
    if fields is not None and not isinstance(fields, TensorDict):
        fields = one_row(fields)
    return kv_batch_put([key], partition_id, fields, None if tag is None else [tag], data_parser)


def kv_batch_put(
    keys: Sequence[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: Sequence[Mapping[str, Any]] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Add columns to rows and merge tags; rows that are missing are made.

    It is stored exactly once, and visible as a whole, but for more than 2,048 rows: these are put
    part by part.

    Args:
        fields: Columns, with as many rows as there are keys.
        data_parser: Changes the columns in place before they are stored, in this process.

    Returns:
        The rows, with all their columns and tags.

    Raises:
        ConfigError: Neither fields nor tags, or another number of them than of keys.
        EncodeError: A value cannot be stored; the message names column, row and type.
        StaleRun: A newer run has begun: this process belongs to an earlier one.
    """
    if fields is None and tags is None:
        raise ConfigError("give `fields` or `tags`, or both.")
    if fields is not None and not isinstance(fields, TensorDict):
        raise ConfigError(f"fields is a {type(fields).__name__}: give a TensorDict.")
    counts = [("tags", tags), ("the batch size of fields", fields)]
    for what, values in counts:
        if values is not None and len(values) != len(keys):
            raise ConfigError(
                f"the number of keys ({len(keys)}) does not match {what} ({len(values)})."
            )
    queue = opened()
    columns = {}
    if fields is not None:
        columns = to_columns(fields, data_parser, pickles=queue.secret is not None)
    partition = queue.partition(partition_id)
    partition.put(keys, columns, tags)
    return Written(keys, partition_id, partition.tags_and_columns)


def kv_batch_get_by_meta(
    meta: KVBatchMeta, select_fields: Sequence[str] | str | None = None
) -> TensorDict:
    """Return columns of the rows of a batch: `select_fields`, or those that the batch names."""
    if meta.partition_id is None:
        raise ConfigError("the batch has no partition_id: set meta.partition_id.")
    names = [select_fields] if isinstance(select_fields, str) else select_fields
    if names is None:
        names = meta.fields
    elif not set(names) <= set(meta.fields or ()):
        raise ConfigError(f"select_fields: {names} were not found in the batch, {meta.fields}.")
    return kv_batch_get(meta.keys, meta.partition_id, names)


def kv_batch_get(
    keys: Sequence[str] | str,
    partition_id: str,
    select_fields: Sequence[str] | str | None = None,
) -> TensorDict:
    """Return columns of rows, in the order of the keys.

    Tensors come as nested tensors with layout jagged, as from TransferQueue. Columns that are not
    there for all of the rows are left out, as verl expects; if none is left, the TensorDict is
    empty, with batch size 0.

    Args:
        select_fields: Columns; None: all that the rows have.

    Raises:
        ConfigError: The partition or a row is missing, or the rows have no column in common.
    """
    keys = [keys] if isinstance(keys, str) else list(keys)
    names = [select_fields] if isinstance(select_fields, str) else select_fields
    return get_columns(known(keys, partition_id), keys, names)


def known(rows: Sequence[object], partition_id: str) -> Partition:
    """Return the partition of rows, which must be there."""
    if not rows:
        raise ConfigError("the list of rows is empty: name at least one.")
    partition = opened().known(partition_id)
    if partition is None:
        raise ConfigError(f"partition {partition_id!r} was not found.")
    return partition


def get_columns(partition: Partition, keys: list[str], names: Sequence[str] | None) -> TensorDict:
    """Return columns of rows that must be there; columns that some row lacks are left out."""
    table = partition.table
    try:
        try:
            rows = table.get(keys, names)
        except MissingRows as error:
            if not error.columns:
                raise
            present = partition.columns(keys)
            rows = table.get(keys, [name for name in names or () if name in present])
    except MissingRows as error:
        raise ConfigError(f"rows or columns were not found: {error}") from error
    if rows:
        return to_tensordict(rows)
    if names is not None and partition.columns(keys):
        return TensorDict({}, batch_size=[0])
    raise ConfigError(f"these rows have no column in common: {keys[:3]} of table {table.name!r}.")


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the tags of the rows of one partition, or of all that have rows, by partition and key.

    From Redis comes only what has changed since the last call in this process. Do not alter the
    tags of a row: the next call returns the same objects.
    """
    queue = opened()
    if partition_id is not None:
        partition = queue.known(partition_id)
        return {} if partition is None else {partition_id: partition.rows()}
    listed = {name: queue.partition(name).rows() for name in queue.names()}
    return {name: rows for name, rows in listed.items() if rows}


def kv_clear(keys: Sequence[str] | str, partition_id: str) -> None:
    """Remove rows; those that are missing are left out.

    Raises:
        StaleRun: A newer run has begun: this process belongs to an earlier one.
    """
    partition = opened().known(partition_id)
    if partition is not None:
        partition.table.clear([keys] if isinstance(keys, str) else list(keys))


async def async_kv_put(*args: Any, **kwargs: Any) -> KVBatchMeta:
    """Do `kv_put` in a thread."""
    return await asyncio.to_thread(kv_put, *args, **kwargs)


async def async_kv_batch_put(*args: Any, **kwargs: Any) -> KVBatchMeta:
    """Do `kv_batch_put` in a thread."""
    return await asyncio.to_thread(kv_batch_put, *args, **kwargs)


async def async_kv_batch_get(*args: Any, **kwargs: Any) -> TensorDict:
    """Do `kv_batch_get` in a thread."""
    return await asyncio.to_thread(kv_batch_get, *args, **kwargs)


async def async_kv_batch_get_by_meta(*args: Any, **kwargs: Any) -> TensorDict:
    """Do `kv_batch_get_by_meta` in a thread."""
    return await asyncio.to_thread(kv_batch_get_by_meta, *args, **kwargs)


async def async_kv_list(*args: Any, **kwargs: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Do `kv_list` in a thread."""
    return await asyncio.to_thread(kv_list, *args, **kwargs)


async def async_kv_clear(*args: Any, **kwargs: Any) -> None:
    """Do `kv_clear` in a thread."""
    await asyncio.to_thread(kv_clear, *args, **kwargs)
