"""Encodes groups of samples: a header and the bodies of its columns for each group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from redrb.codec.bodies import EncodedColumn, Part, encode_column
from redrb.codec.columns import Column, Grouping
from redrb.codec.gather import dtypes_differ, gather_batch, gather_items
from redrb.codec.heads import layouts_of_groups, layouts_of_lone, pack_heads
from redrb.codec.lone import encode_lone
from redrb.codec.metadata import Metadata, metadata_of_items, metadata_of_rows
from redrb.codec.wire import (
    BFLOAT16,
    DECODED_BYTES,
    FLOAT16,
    INT8,
    MAX_BLOB_BYTES,
    MAX_SAMPLES,
    UINT64,
    decoded_limit,
)
from redrb.errors import EncodeError
from redrb.experience.records import BufferItem, Experience, batch_size
from redrb.experience.status import Status

NarrowFloats: TypeAlias = Literal["float16", "bfloat16"]

_NARROW = {None: None, "float16": FLOAT16, "bfloat16": BFLOAT16}
_NO_VERSION = np.iinfo(np.int64).max


class EncodedGroup(NamedTuple):
    """The bytes of one group, with the facts that a task keeps beside them.

    Attributes:
        parts: Pieces of the blob. They may share memory with the caller's tensors: join or send
            them before the tensors change.
        nbytes: Bytes of the blob.
        samples: Samples in the group, >= 1.
        policy_version: The oldest of the samples' policy versions and of their token versions
            >= 0; None where there is none at all.
        status: The group's status, derived from its samples'.
    """

    parts: tuple[Part, ...]
    nbytes: int
    samples: int
    policy_version: int | None
    status: Status


def encode_groups(
    groups: Sequence[Sequence[BufferItem]],
    *,
    policy_version: int | None = None,
    narrow_floats: NarrowFloats | None = None,
) -> list[EncodedGroup]:
    """Encode groups of samples, each to one blob; many in one call are the fastest.

    A blob depends on its group alone, and the caller's items are not changed.

    Args:
        groups: Groups of at least one sample each.
        policy_version: Policy version of samples that have none.
        narrow_floats: Store float32 and float64 bodies as this dtype. They are decoded to their
            original dtype, rounded; groups with values beyond float16's range keep full precision.

    Raises:
        RecordError: A field is no tensor.
        EncodeError: The wire format cannot hold a group; nothing was encoded.
    """
    narrow = _narrow_code(narrow_floats)
    for index, group in enumerate(groups):
        if not 1 <= len(group) <= MAX_SAMPLES:
            raise EncodeError(
                f"group {index} has {len(group)} samples: a group holds 1 to {MAX_SAMPLES}."
            )
    if not groups:
        return []
    items = list(chain.from_iterable(groups))
    columns = gather_items(items)
    if columns is None:
        if len(groups) == 1:
            raise dtypes_differ(items)
        return [
            encode_groups([group], policy_version=policy_version, narrow_floats=narrow_floats)[0]
            for group in groups
        ]
    if len(items) == len(groups):
        grouping = Grouping.lone(len(items))
    else:
        grouping = Grouping.of([len(group) for group in groups])
    metadata = metadata_of_items(groups, policy_version)
    return _encode(columns, grouping, metadata, narrow)


def encode_experience(
    experience: Experience,
    *,
    policy_version: int | None = None,
    narrow_floats: NarrowFloats | None = None,
) -> list[EncodedGroup]:
    """Encode a batch, one group a row, with its padding: the fast path.

    Args:
        experience: A batch of B rows.
        policy_version: As for `encode_groups`.
        narrow_floats: As for `encode_groups`.

    Raises:
        RecordError: Fields or metadata differ in B.
        EncodeError: The wire format cannot hold a row; nothing was encoded.
    """
    narrow = _narrow_code(narrow_floats)
    size = batch_size(experience)
    if size == 0:
        return []
    columns = gather_batch(experience)
    metadata = metadata_of_rows(experience, size, policy_version)
    return _encode(columns, Grouping.lone(size), metadata, narrow)


def _narrow_code(narrow_floats: str | None) -> int | None:
    if narrow_floats not in _NARROW:
        raise EncodeError(f'narrow_floats is {narrow_floats!r}, not None, "float16" or "bfloat16".')
    return _NARROW[narrow_floats]


def _encode(
    columns: Sequence[Column], grouping: Grouping, metadata: Sequence[Metadata], narrow: int | None
) -> list[EncodedGroup]:
    """Encode all columns, then join each group's header and bodies."""
    if grouping.alone and all(column.shape is not None for column in columns):
        return _encode_lone(columns, grouping, metadata, narrow)
    encoded = [encode_column(column, grouping, narrow) for column in columns]
    layouts = layouts_of_groups(columns, encoded, grouping)
    heads = list(pack_heads(columns, layouts, metadata))
    body_bytes = sum((column.nbytes for column in encoded), np.zeros_like(grouping.counts))
    sizes = [len(head) + size for head, size in zip(heads, body_bytes.tolist(), strict=True)]
    _check_sizes(columns, grouping, sizes)
    bodies = _bodies(encoded, len(heads))
    versions = _oldest(columns, grouping, metadata)
    return [
        EncodedGroup((head, *body), size, each.samples, version, each.status)
        for head, body, size, each, version in zip(
            heads, bodies, sizes, metadata, versions, strict=True
        )
    ]


def _encode_lone(
    columns: Sequence[Column], grouping: Grouping, metadata: Sequence[Metadata], narrow: int | None
) -> list[EncodedGroup]:
    """Encode groups of one sample whose shapes are all alike: the fast path."""
    encoded = [encode_lone(column, narrow) for column in columns]
    heads = list(pack_heads(columns, layouts_of_lone(columns, encoded), metadata))
    sizes = _lone_sizes(heads, [column.nbytes for column in encoded])
    _check_sizes(columns, grouping, sizes)
    parts = zip(
        heads, *(column.bodies for column in encoded if column.bodies is not None), strict=True
    )
    versions = _oldest(columns, grouping, metadata)
    return [
        EncodedGroup(body, size, 1, version, each.status)
        for body, size, each, version in zip(parts, sizes, metadata, versions, strict=True)
    ]


def _lone_sizes(heads: Sequence[bytes], bodies: Sequence[list[int] | int]) -> list[int]:
    """Return the size of each group in bytes.

    Args:
        heads: The head of each group.
        bodies: For each column the size of its body in every group, or one size for all groups.
    """
    even = sum(size for size in bodies if isinstance(size, int))
    uneven = [sizes for sizes in bodies if not isinstance(sizes, int)]
    return [even + sum(sizes) for sizes in zip(map(len, heads), *uneven, strict=True)]


def _bodies(encoded: Sequence[EncodedColumn], groups: int) -> Iterable[Iterable[Part]]:
    """Return the parts of each group's body, column after column."""
    if not encoded:
        return [()] * groups
    rows = zip(*(column.bodies for column in encoded), strict=True)
    return map(chain.from_iterable, rows)


def _check_sizes(columns: Sequence[Column], grouping: Grouping, sizes: Sequence[int]) -> None:
    """Refuse groups that are larger than a reader accepts."""
    if max(sizes) > MAX_BLOB_BYTES:
        raise EncodeError(
            f"a group has {max(sizes)} bytes, the limit is {MAX_BLOB_BYTES}: put smaller groups."
        )
    if sum(column.flat.nbytes for column in columns) <= DECODED_BYTES:
        return
    raw = sum((column.spans.counts * column.dtype.itemsize for column in columns), np.int64(0))
    for size, decoded in zip(sizes, np.add.reduceat(raw, grouping.firsts).tolist(), strict=True):
        if decoded > decoded_limit(size):
            raise EncodeError(
                f"a group of {decoded} bytes has only {size} bytes without its runs of one value: "
                "cut its padding off before putting it."
            )


def _oldest(
    columns: Sequence[Column], grouping: Grouping, metadata: Sequence[Metadata]
) -> list[int | None]:
    """Return each group's oldest policy version; token versions count too."""
    versions = [group.policy_version for group in metadata]
    column = next((column for column in columns if column.name == "token_versions"), None)
    if column is None or column.flat.size == 0:
        return versions
    if not INT8 <= column.dtype.code <= UINT64:
        raise EncodeError(f"token_versions is {column.dtype.tensor}: versions are integers.")
    tokens = column.flat.astype(np.int64)
    known = np.where(tokens >= 0, tokens, _NO_VERSION)
    edges = np.append(known, _NO_VERSION)  # a place for a last group without tokens
    lengths = np.add.reduceat(column.spans.counts, grouping.firsts)
    tokens = np.minimum.reduceat(edges, column.spans.starts[grouping.firsts])
    tokens = np.where(lengths > 0, tokens, _NO_VERSION)
    return [
        token if token != _NO_VERSION and (version is None or token < version) else version
        for token, version in zip(tokens.tolist(), versions, strict=True)
    ]
