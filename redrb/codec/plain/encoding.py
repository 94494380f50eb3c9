"""Encodes one group: runs are taken off, the rest is stored in the narrowest lossless dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from redrb.codec.dtypes import (
    BOOL,
    DTYPES,
    INT8,
    INT64,
    UINT8,
    UINT64,
    DType,
    Storage,
)
from redrb.codec.plain.group import memory
from redrb.codec.wire import (
    MAGIC,
    MAX_BLOB_BYTES,
    MAX_ELEMENTS,
    MAX_HEADER_BYTES,
    MAX_RANK,
    MAX_SCHEMA_BYTES,
    MIN_RUN,
    PREFIX,
    VERSION,
    decoded_limit,
    one_or_all,
    tensor_limit,
)
from redrb.errors import EncodeError

_SIGNED = range(INT8, INT64 + 1)
_UNSIGNED = range(UINT8, UINT64 + 1)


def collect(*_: Any) -> None:
    """Leave all groups to `Collector.any`, which asks tensors one by one, and to `check_groups`.

    The compiled kernel returns `Columns` of a group, found in one pass over its samples: None where
    a value is not exactly of the type of tensors with its elements in order in CPU memory, a field
    has several dtypes, or a limit of the format is exceeded. It takes

        samples, tables: the samples, and the further tensors of each
        names, keys: the fields, standard ones first, and the packed key of each in the schema
        rules: four bytes for each standard field: least and most dimensions; whether it describes
            actions, not tokens; 1 for integers, 2 for finite, 4 for tokens' versions, 8 for a field
            that samples may lack, 16 for one that `encode` checks
        types: the type of tensors, and their dtypes of signed and unsigned bytes
        exchange: `__dlpack_c_exchange_api__` of tensors
    """
    return


@dataclass(slots=True)
class _Sample:
    """One sample of one column: its elements, its runs, and what remains for the body."""

    shape: tuple[int, ...]
    body: Storage
    broken: bool  # an element is nan or infinite
    lead: int = 0
    lead_value: int = 0
    trail: int = 0
    trail_value: int = 0


def encode(
    samples: int, columns: list[Any], tails: int, tail: bytes, extras: bytes
) -> tuple[bytes, bool]:
    """Return the blob of one group, and whether all floats in columns to check are finite.

    The floats are checked as they are copied. Columns are a list of `EncodedColumn`, or the memory
    that the compiled `collect` found. Raises EncodeError where the blob exceeds a limit, and
    ValueError where a shape does, or where collected columns are encoded again.
    """
    shapes: dict[tuple[int, ...], int] = {}
    schema, entries, bodies, decoded, tensors, finite = [], [], [], 0, 0, True
    for key, code, rounded, cells, checked in columns:
        dtype = DTYPES[code]
        column = [_sample(cell, dtype, rounded, shapes) for cell in cells]
        present = [sample for sample in column if sample is not None]
        if not present:
            continue
        wire = rounded if rounded >= 0 else _narrowest(dtype, [sample.body for sample in present])
        schema.append(b"\x93" + key + msgpack.packb(code) + msgpack.packb(wire))
        entries.append(_entry(column, shapes))
        bodies += [_stored(sample.body, wire) for sample in present]
        tensors += len(present)
        decoded += sum(math.prod(sample.shape) for sample in present) * dtype.itemsize
        finite = finite and not (checked and any(sample.broken for sample in present))
    packed_schema = msgpack.Packer().pack_array_header(len(schema)) + b"".join(schema)
    if len(packed_schema) > MAX_SCHEMA_BYTES:
        raise EncodeError("the names in `tensors` are too long: shorten them.")
    header = msgpack.Packer().pack_array_header(3 + tails) + b"".join(
        (msgpack.packb(samples), msgpack.packb(entries), msgpack.packb(list(shapes)), tail)
    )
    if len(header) > MAX_HEADER_BYTES:
        raise EncodeError(
            f"a group's header has {len(header)} bytes, the limit is {MAX_HEADER_BYTES}: "
            "use fewer tags or put smaller groups."
        )
    prefix = PREFIX.pack(MAGIC, VERSION, 0, len(packed_schema), len(header), len(extras))
    blob = b"".join((prefix, packed_schema, header, extras, *bodies))
    if len(blob) > MAX_BLOB_BYTES:
        raise EncodeError(
            f"a group has {len(blob)} bytes, the limit is {MAX_BLOB_BYTES}: put smaller groups."
        )
    if decoded > decoded_limit(len(blob)):
        raise EncodeError(
            f"a group of {decoded} bytes is little but runs of one value, {len(blob)} bytes "
            "packed: cut its padding off before putting it."
        )
    if tensors > tensor_limit(len(blob)):
        raise EncodeError(
            f"a group has {tensors} tensors in {len(blob)} bytes: leave empty and constant ones "
            "out, or put smaller groups."
        )
    return blob, finite


def _sample(
    cell: Any, dtype: DType, rounded: int, shapes: dict[tuple[int, ...], int]
) -> _Sample | None:
    if cell is None:
        return None
    shape = tuple(cell[1])
    if len(shape) > MAX_RANK or math.prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise ValueError("a shape is too large")
    shapes.setdefault(shape, len(shapes))
    flat = memory(cell[0], dtype, math.prod(shape))
    if dtype.code == BOOL:
        flat = (flat != 0).view(np.uint8)
    bad = dtype.exponent and bool((flat & dtype.exponent == dtype.exponent).any())
    sample = _Sample(shape, flat, bool(bad))
    lead = _run(flat)
    if lead >= MIN_RUN:
        sample.lead, sample.lead_value = lead, int(flat[0])
    trail = _run(flat[sample.lead :][::-1])  # both fit, even if another thread writes to the tensor
    if trail >= MIN_RUN:
        sample.trail, sample.trail_value = trail, int(flat[-1])
    if rounded >= 0:
        flat = memory(cell[2], DTYPES[rounded], math.prod(shape))
    sample.body = flat[sample.lead : len(flat) - sample.trail]
    return sample


def _run(flat: Storage) -> int:
    """Return how many elements at the start are one value."""
    if len(flat) == 0:
        return 0
    changes = np.flatnonzero(flat != flat[0])
    return int(changes[0]) if len(changes) else len(flat)


def _narrowest(dtype: DType, bodies: list[Storage]) -> int:
    """Return the code of the narrowest dtype that holds the bodies of a whole group."""
    integer = dtype.code in (*_SIGNED, *_UNSIGNED)
    if not integer and dtype.code != BOOL:
        return dtype.code
    filled = [body for body in bodies if len(body)]
    if not filled or dtype.code == BOOL:
        return BOOL
    low = min(int(body.min()) for body in filled)
    high = max(int(body.max()) for body in filled)
    if low >= 0 and high <= 1:
        return BOOL
    for code in _UNSIGNED if low >= 0 else _SIGNED:
        if DTYPES[code].low <= low and high <= DTYPES[code].high:
            return code if DTYPES[code].itemsize < dtype.itemsize else dtype.code
    return dtype.code


def _stored(body: Storage, wire: int) -> bytes:
    if wire == BOOL:
        return np.packbits(body != 0, bitorder="little").tobytes()
    return body.astype(DTYPES[wire].storage, copy=False).tobytes()


def _entry(column: list[_Sample | None], shapes: dict[tuple[int, ...], int]) -> Any:
    """Return a column's entry in the header: parts that are one for all samples, or a list."""
    refs = one_or_all([None if sample is None else shapes[sample.shape] for sample in column])
    runs = [
        [0 if sample is None else getattr(sample, name) for sample in column]
        for name in ("lead", "lead_value", "trail", "trail_value")
    ]
    if any(runs[2]):
        return (refs, *map(one_or_all, runs))
    if any(runs[0]):
        return (refs, *map(one_or_all, runs[:2]))
    return (refs,) if isinstance(refs, list) else refs
