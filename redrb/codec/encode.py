"""Groups of samples to bytes: a header and the columns' bodies, one blob for each group."""

from __future__ import annotations

from collections.abc import Sequence

from redrb.codec import kernels
from redrb.codec.collecting import Collected, Collector, check_shapes
from redrb.codec.encoded import EncodedGroup
from redrb.codec.kernels import Columns
from redrb.codec.metadata import Metadata, metadata_of_items
from redrb.codec.wire import MAX_SAMPLES
from redrb.errors import EncodeError
from redrb.experience.checking import check_groups
from redrb.experience.consistency import check_alike, check_values
from redrb.experience.records import BufferItem


def encode_groups(
    groups: Sequence[Sequence[BufferItem]], *, policy_version: int | None = None
) -> list[EncodedGroup]:
    """Encode groups of samples, one blob each.

    A blob depends on its group alone, and the caller's items are not changed. An element that
    another thread changes meanwhile may be stored as any value; tensors must not be resized.

    Args:
        groups: Groups of at least one sample each.
        policy_version: Stands in where a sample has no policy version.

    Raises:
        RecordError: A field is no tensor.
        EncodeError: The wire format cannot hold a group; nothing was encoded.
    """
    collector = Collector()
    return _encode_all(groups, collector, list(map(collector.plain, groups)), policy_version)


def check_and_encode_groups(
    groups: Sequence[Sequence[BufferItem]],
    *,
    policy_version: int | None = None,
    values: bool = False,
    alike: bool = False,
    first: int = 0,
) -> list[EncodedGroup]:
    """Refuse what `check_groups` refuses, rewards that are not finite too, and encode the groups.

    Compiled, all checks and the collecting are one pass over samples that are sound; values are
    checked as they are copied.

    Args:
        groups, policy_version: As for `encode_groups`.
        values: Refuse other numbers that are not finite, see `check_values`.
        alike: Refuse groups whose samples differ in their fields, see `check_alike`.
        first: Index of the first group in its put, for messages.

    Raises:
        RecordError: As `check_groups`, `check_values` and `check_alike`; a reward is not finite.
        EncodeError: As `encode_groups`.
    """
    collector = Collector(values=values)
    plain = list(map(collector.plain, groups))
    if not all(columns is not None and columns.sound for columns in plain):
        for bad_reward in check_groups(groups, first).values():
            raise bad_reward
    if alike:
        for at, (group, columns) in enumerate(zip(groups, plain, strict=True), first):
            if group and not (columns is not None and columns.even):
                check_alike(group, at)
    encoded = _encode_all(groups, collector, plain, policy_version, first)
    for at, found in enumerate(encoded):
        if not found.finite:
            check_values(groups[at], first + at)
    return encoded


def _encode_all(
    groups: Sequence[Sequence[BufferItem]],
    collector: Collector,
    plain: Sequence[Columns | None],
    policy_version: int | None,
    first: int = 0,
) -> list[EncodedGroup]:
    """Encode groups, of which the kernel has collected the plain ones."""
    for index, group in enumerate(groups, first):
        if not 1 <= len(group) <= MAX_SAMPLES:
            raise EncodeError(
                f"group {index} has {len(group)} samples: a group holds 1 to {MAX_SAMPLES}."
            )
    metadata = metadata_of_items(groups, policy_version)
    return [
        _encode(
            collector.any(group)
            if found is None
            else Collected(found.memory, [], found.oldest, found.newest),
            meta,
        )
        for group, found, meta in zip(groups, plain, metadata, strict=True)
    ]


def _encode(collected: Collected, metadata: Metadata) -> EncodedGroup:
    """Encode the columns of one group."""
    columns, meta = collected.columns, metadata
    try:
        blob, finite = kernels.kernel.encode(
            meta.samples, columns, meta.tails, meta.tail, meta.extras
        )
    except ValueError:
        if isinstance(columns, list):
            check_shapes(columns)
        raise
    version, newest = meta.policy_version, meta.newest
    if collected.oldest is not None and (version is None or collected.oldest < version):
        version = collected.oldest
    if collected.newest is not None and (newest is None or collected.newest > newest):
        newest = collected.newest
    return EncodedGroup(blob, meta.samples, version, meta.status, newest, finite)
