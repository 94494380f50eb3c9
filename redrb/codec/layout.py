"""Reading a blob's header: everything is checked here, before anything is allocated for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from redrb.codec import kernels
from redrb.codec.dtypes import DTYPES, DType
from redrb.codec.kernels import Group
from redrb.codec.wire import (
    COMPLETED,
    INT64_RANGE,
    MAX_COLUMNS,
    MAX_GROUP_ID_BYTES,
    MAX_NAME_BYTES,
    MAX_TAGS,
    STATUSES,
    malformed,
)
from redrb.errors import DecodeError
from redrb.experience.fields import TENSOR_FIELDS, Scalar, Shape
from redrb.experience.status import Status
from redrb.unpacking import unpack

FIELD_CODES: Final = {name: code for code, name in enumerate(TENSOR_FIELDS)}
"""The numbers that stand for standard fields on the wire."""


class Field(NamedTuple):
    """One column of a schema."""

    name: str
    dtype: DType
    wire: int


@lru_cache(maxsize=128)
def lookup(schema: bytes) -> tuple[tuple[Field, ...], bytes]:
    """Return the columns of a schema, and two bytes for each: codes of dtype and wire dtype."""
    fields = parse_schema(schema)
    return fields, bytes(code for field in fields for code in (field.dtype.code, field.wire))


def parse_schema(schema: bytes) -> tuple[Field, ...]:
    """Return the columns of a schema from an untrusted source, or raise DecodeError."""
    listed = unpack(schema, "schema")
    if type(listed) is not list or len(listed) > MAX_COLUMNS:
        malformed("its schema is no list of columns")
    fields = tuple(map(_parse_field, listed))
    if len({field.name for field in fields}) != len(fields):
        malformed("its schema has a column twice")
    return fields


def _parse_field(column: object) -> Field:
    if type(column) is not list or len(column) != 3:
        malformed(f"column {column!r:.80} is no name, dtype and wire dtype")
    name, code, wire = column
    if type(name) is int and 0 <= name < len(TENSOR_FIELDS):
        name = TENSOR_FIELDS[name]
    elif type(name) is not str or name in FIELD_CODES or len(name.encode()) > MAX_NAME_BYTES:
        malformed(f"a column's name is {name!r:.80}")
    if type(code) is not int or not 0 <= code < len(DTYPES):
        malformed(f"column {name} has the unknown dtype {code!r:.80}")
    dtype = DTYPES[code]
    if type(wire) is not int or wire not in dtype.wires:
        malformed(f"column {name} of {dtype.name} is stored as {wire!r:.80}")
    return Field(name, dtype, wire)


Blob: TypeAlias = bytes | memoryview

_SCALARS = frozenset((str, int, float, bool))


@dataclass(slots=True, init=False, eq=False, repr=False)
class GroupLayout:
    """One group's blob, checked in full, with all that is needed to decode it.

    Attributes:
        blob: The bytes; a view keeps the memory behind it alive.
        nbytes: How many.
        group: The checked blob as the kernel reads it.
        samples: Samples in the group, >= 1.
        policy_versions: Policy version of each sample.
        statuses: Status of each sample.
        group_id: Name of the group.
        tags: Tags of each sample; samples may share one dict, so copy before changing.
        extras: Extras of each sample.
        decoded_bytes: Bytes of all its tensors.
        fields: Its columns.
    """

    blob: Blob
    nbytes: int
    group: Group
    samples: int
    policy_versions: list[int | None]
    statuses: list[Status]
    group_id: str | None
    tags: list[dict[str, Scalar]]
    extras: list[dict[str, Any]]
    decoded_bytes: int
    fields: tuple[Field, ...]

    def shapes(self, column: int) -> list[Shape | None]:
        """Return the shape of each sample of a column; None where a sample has none."""
        return [piece and piece[0] for piece in self.group.pieces(column)]


def parse_groups(blobs: Iterable[Blob]) -> list[GroupLayout | DecodeError]:
    """Parse many blobs; of each that `parse_group` refuses, the error takes its place."""
    found: list[GroupLayout | DecodeError] = []
    for blob in blobs:
        try:
            found.append(parse_group(blob))
        except DecodeError as error:
            found.append(error.with_traceback(None))
    return found


def parse_group(blob: Blob) -> GroupLayout:
    """Check a blob of untrusted bytes in full and say where everything in it lies.

    What this returns can be decoded; only groups that do not fit each other can still fail then.

    Args:
        blob: `bytes`, or a flat contiguous view of bytes that nobody changes any more.

    Raises:
        DecodeError: The bytes are not exactly one group in a version of the format known here.
    """
    if type(blob) is not bytes:
        check_bytes(blob)
    group = kernels.kernel.parse(blob, lookup)
    layout = GroupLayout()
    layout.blob, layout.nbytes, layout.group = blob, len(blob), group
    layout.samples = samples = group.samples
    layout.fields, layout.decoded_bytes = group.fields, group.decoded_bytes
    version = group.version
    if version is not None or group.tails == 0:
        layout.policy_versions = [version] * samples
        layout.statuses = [Status.COMPLETED] * samples
        layout.group_id = None
        layout.tags = [{} for _ in range(samples)]
    else:
        head = b"\xdd" + group.tails.to_bytes(4, "big")
        parse_tail(layout, *unpack(head + (group.tail or b""), "header")[:4])
    extras = group.extras
    layout.extras = parse_extras(extras, samples) if extras else [{} for _ in range(samples)]
    return layout


def check_bytes(blob: object) -> None:
    """Raise DecodeError unless it is `bytes`, or a flat view of bytes."""
    if isinstance(blob, bytes):
        return
    if not isinstance(blob, memoryview):
        malformed(f"it is a {type(blob).__name__}, not bytes")
    if blob.format != "B" or blob.ndim != 1 or not blob.c_contiguous:
        malformed(f"it is a view of {blob.format!r} {blob.shape}, not of plain bytes")


def parse_tail(
    layout: GroupLayout,
    versions: object = None,
    statuses: object = COMPLETED,
    group_id: object = None,
    tags: object = None,
) -> None:
    """Fill in the metadata, whose elements may be absent at the end of the header."""
    for version in versions if type(versions) is list else (versions,):
        if version is not None and (type(version) is not int or version not in INT64_RANGE):
            malformed(f"a policy version is {version!r:.80}")
    for code in statuses if type(statuses) is list else (statuses,):
        if type(code) is not int or not 0 <= code < len(STATUSES):
            malformed(f"a status is {code!r:.80}")
    layout.policy_versions = _each(versions, layout.samples)
    layout.statuses = [STATUSES[code] for code in _each(statuses, layout.samples)]
    if group_id is not None and (
        type(group_id) is not str or len(group_id.encode()) > MAX_GROUP_ID_BYTES
    ):
        malformed(f"its group_id is {group_id!r:.80}")
    layout.group_id = group_id
    if tags is None:
        layout.tags = [{} for _ in range(layout.samples)]
    else:
        layout.tags = _each(tags, layout.samples)
        for sample_tags in layout.tags if type(tags) is list else layout.tags[:1]:
            if type(sample_tags) is not dict or len(sample_tags) > MAX_TAGS:
                malformed("the tags of a sample are no small map")
            for key, value in sample_tags.items():
                if type(key) is not str or len(key.encode()) > MAX_NAME_BYTES:
                    malformed(f"a tag's key is {key!r:.80}")
                if type(value) not in _SCALARS:
                    malformed(f"tag {key!r:.80} is a {type(value).__name__}")


def _each(part: object, samples: int) -> list[Any]:
    """Return a value a sample, of one for all or a list with one for each."""
    if type(part) is not list:
        return [part] * samples
    if len(part) != samples:
        malformed(f"a list of {len(part)} entries is to describe {samples} samples")
    return part


def parse_extras(packed: Blob, samples: int) -> list[dict[str, Any]]:
    """Return each sample's extras, or raise DecodeError."""
    if not packed:
        return [{} for _ in range(samples)]
    extras = unpack(packed, "extras")
    if type(extras) is not list or len(extras) != samples:
        malformed(f"its extras are not those of {samples} samples")
    for sample in extras:
        if type(sample) is not dict or any(type(key) is not str for key in sample):
            malformed("the extras of a sample are no map with names as keys")
    return extras
