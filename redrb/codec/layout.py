"""Parses and checks the header of one blob, before memory is allocated for its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from redrb.codec.schema import Field, parse_schema
from redrb.codec.wire import (
    COMPLETED,
    INT64_RANGE,
    MAGIC,
    MAX_BLOB_BYTES,
    MAX_ELEMENTS,
    MAX_EXTRAS_BYTES,
    MAX_GROUP_ID_BYTES,
    MAX_HEADER_BYTES,
    MAX_NAME_BYTES,
    MAX_RANK,
    MAX_SAMPLES,
    MAX_TAGS,
    PREFIX,
    STATUSES,
    VERSION,
    decoded_limit,
    malformed,
    unpack,
)
from redrb.experience.padding import Shape
from redrb.experience.records import Scalar
from redrb.experience.status import Status

Blob: TypeAlias = bytes | memoryview
Piece: TypeAlias = tuple[Shape, int, int, int, int, int, int, int]
"""One sample of one column: its shape, the number of elements in its body, length and value of the
run at its start (lead) and at its end (trail), and where in the blob the body begins and ends."""

_SCALARS = frozenset((str, int, float, bool))


class Rows(Protocol):
    """Pieces of many groups that were parsed together; `Table` is the implementation."""

    def pieces(self, row: int) -> list[list[Piece | None]]:
        """Return the pieces of one of the groups."""


class GroupLayout:
    """The checked structure of one group's blob: all that decoding needs.

    Attributes:
        blob: The bytes; a view keeps its underlying buffer alive.
        nbytes: Length of the blob.
        samples: Samples in the group, >= 1.
        policy_versions: Policy version of each sample.
        statuses: Status of each sample.
        group_id: Name of the group.
        tags: Tags of each sample; samples may share one dict, so copy before changing.
        extras: Extras of each sample.
        decoded_bytes: Bytes of all its tensors.
        fields: Its columns.
        rows: The pieces of all groups that were parsed together; None if it was parsed alone.
        row: Index of this group in `rows`.
        own_pieces: The pieces if it was parsed alone.
    """

    __slots__ = (
        "blob",
        "decoded_bytes",
        "extras",
        "fields",
        "group_id",
        "nbytes",
        "own_pieces",
        "policy_versions",
        "row",
        "rows",
        "samples",
        "statuses",
        "tags",
    )

    blob: Blob
    nbytes: int
    samples: int
    policy_versions: list[int | None]
    statuses: list[Status]
    group_id: str | None
    tags: list[dict[str, Scalar]]
    extras: list[dict[str, Any]]
    decoded_bytes: int
    fields: tuple[Field, ...]
    rows: Rows | None
    row: int
    own_pieces: list[list[Piece | None]]

    @property
    def pieces(self) -> list[list[Piece | None]]:
        """For each column the piece of each sample; None if the sample lacks the field."""
        return self.own_pieces if self.rows is None else self.rows.pieces(self.row)


def parse_group(blob: Blob) -> GroupLayout:
    """Check a blob of untrusted bytes in full and return where everything in it lies.

    The returned layout can always be decoded; only groups that do not fit into one batch may fail.

    Args:
        blob: `bytes`, or a flat contiguous view of bytes that nobody changes any more.

    Raises:
        DecodeError: The bytes are not exactly one group in a version of the format known here.
    """
    header_at, extras_at, body_at = find_sections(blob)
    layout = GroupLayout()
    layout.blob, layout.nbytes = blob, len(blob)
    layout.rows, layout.row = None, 0
    layout.fields = parse_schema(bytes(blob[PREFIX.size : header_at]))
    _parse_header(layout, unpack(blob[header_at:extras_at], "header"), body_at)
    layout.extras = parse_extras(blob[extras_at:body_at], layout.samples)
    return layout


def find_sections(blob: Blob) -> tuple[int, int, int]:
    """Return where header, extras and bodies begin; the schema follows the prefix.

    Raises:
        DecodeError: It is no blob, or its sections do not fit into it.
    """
    check_bytes(blob)
    if not PREFIX.size <= len(blob) <= MAX_BLOB_BYTES:
        malformed(f"it has {len(blob)} bytes")
    magic, version, flags, schema_bytes, header_bytes, extras_bytes = PREFIX.unpack_from(blob)
    if magic != MAGIC:
        malformed(f"it starts with {magic!r}")
    if version != VERSION or flags:
        malformed(
            f"it is written in version {version} with flags {flags}, and only version {VERSION} "
            "without flags is known here: upgrade redrb"
        )
    header_at = PREFIX.size + schema_bytes
    extras_at = header_at + header_bytes
    body_at = extras_at + extras_bytes
    if header_bytes > MAX_HEADER_BYTES or extras_bytes > MAX_EXTRAS_BYTES or body_at > len(blob):
        malformed("its header or extras are longer than allowed")
    return header_at, extras_at, body_at


def check_bytes(blob: object) -> None:
    """Raise DecodeError unless it is `bytes`, or a flat view of bytes."""
    if isinstance(blob, bytes):
        return
    if not isinstance(blob, memoryview):
        malformed(f"it is a {type(blob).__name__}, not bytes")
    if blob.format != "B" or blob.ndim != 1 or not blob.c_contiguous:
        malformed(f"it is a view of {blob.format!r} {blob.shape}, not of plain bytes")


def _parse_header(layout: GroupLayout, header: object, body_at: int) -> None:
    """Fill the layout in from its header, whose bodies lie from `body_at` on."""
    if type(header) is not list or len(header) < 3:
        malformed("its header is no list of at least three elements")
    samples, columns, shapes, *tail = header
    if type(samples) is not int or not 1 <= samples <= MAX_SAMPLES:
        malformed(f"it has {samples!r:.80} samples")
    layout.samples = samples
    parse_tail(layout, *tail[:4])
    if type(columns) is not list or len(columns) != len(layout.fields):
        malformed("its header and its schema have different columns")
    if type(shapes) is not list:
        malformed("its shapes are no list")
    _place(layout, columns, list(map(parse_shape, shapes)), body_at)


def parse_shape(shape: object) -> tuple[Shape, int]:
    """Return a shape and its number of elements."""
    if type(shape) is not list or len(shape) > MAX_RANK:
        malformed(f"a shape is {shape!r:.80}")
    count = room = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_ELEMENTS:
            malformed(f"a dimension is {size!r:.80}")
        count *= size
        room *= size or 1
    if room > MAX_ELEMENTS:
        malformed(f"a shape is {shape}")
    return tuple(shape), count


def _place(
    layout: GroupLayout, columns: list[Any], shapes: list[tuple[Shape, int]], body_at: int
) -> None:
    """Set the piece of each sample of each column; bodies follow one another."""
    end, decoded = body_at, 0
    layout.own_pieces = []
    for field, entry in zip(layout.fields, columns, strict=True):
        name, dtype, _, wire_size = field
        pieces: list[Piece | None] = []
        for ref, lead, lead_value, trail, trail_value in _spread(name, entry, layout.samples):
            if ref is None:
                pieces.append(None)
                continue
            if type(ref) is not int or not 0 <= ref < len(shapes):
                malformed(f"column {name} refers to shape {ref!r:.80}")
            shape, count = shapes[ref]
            decoded += count * dtype.itemsize
            if lead != 0 or trail != 0:
                _check_run(field, lead, lead_value)
                _check_run(field, trail, trail_value)
                count -= lead + trail
                if count < 0:
                    malformed(f"column {name} has runs longer than its {shape}")
            start = end
            end += count * wire_size if wire_size else (count + 7) >> 3
            pieces.append((shape, count, lead, lead_value, trail, trail_value, start, end))
        layout.own_pieces.append(pieces)
    if end != layout.nbytes:
        malformed(f"its columns end at byte {end} of {layout.nbytes}")
    if decoded > decoded_limit(layout.nbytes):
        malformed(f"{layout.nbytes} bytes claim to hold {decoded}")
    layout.decoded_bytes = decoded


def _spread(name: str, entry: object, samples: int) -> Iterable[Sequence[Any]]:
    """Return an entry as shape, lead, lead value, trail and trail value of each sample."""
    if type(entry) is int:
        return [(entry, 0, 0, 0, 0)] * samples
    if type(entry) is not list or not 1 <= len(entry) <= 5:
        malformed(f"column {name} is placed by {entry!r:.80}")
    entry += (0,) * (5 - len(entry))
    if samples == 1:
        return [entry]
    return zip(*[_each(part, samples) for part in entry], strict=True)


def _check_run(field: Field, length: object, value: object) -> None:
    if type(length) is not int or length < 0:
        malformed(f"column {field.name} has a run of {length!r:.80} elements")
    if type(value) is not int or not field.dtype.low <= value <= field.dtype.high:
        malformed(f"column {field.name} has a run of the value {value!r:.80}")


def parse_tail(
    layout: GroupLayout,
    versions: object = None,
    statuses: object = COMPLETED,
    group_id: object = None,
    tags: object = None,
) -> None:
    """Fill in the metadata; elements that are absent at the end of the header have defaults."""
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
            _check_tags(sample_tags)


def _each(part: object, samples: int) -> list[Any]:
    """Return one value for each sample, from one for all or from a list."""
    if type(part) is not list:
        return [part] * samples
    if len(part) != samples:
        malformed(f"a list of {len(part)} entries is to describe {samples} samples")
    return part


def _check_tags(tags: object) -> None:
    if type(tags) is not dict or len(tags) > MAX_TAGS:
        malformed("the tags of a sample are no small map")
    for key, value in tags.items():
        if type(key) is not str or len(key.encode()) > MAX_NAME_BYTES:
            malformed(f"a tag's key is {key!r:.80}")
        if type(value) not in _SCALARS:
            malformed(f"tag {key!r:.80} is a {type(value).__name__}")


def parse_extras(packed: Blob, samples: int) -> list[dict[str, Any]]:
    """Return each sample's extras.

    Raises:
        DecodeError: They are not those of so many samples.
    """
    if not packed:
        return [{} for _ in range(samples)]
    extras = unpack(packed, "extras")
    if type(extras) is not list or len(extras) != samples:
        malformed(f"its extras are not those of {samples} samples")
    for sample in extras:
        if type(sample) is not dict or any(type(key) is not str for key in sample):
            malformed("the extras of a sample are no map with names as keys")
    return extras
