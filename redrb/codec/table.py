"""Parses many blobs at once: groups of one sample with one schema, checked column by column.

The groups of a take are mostly alike, and a Python call costs more than its work for one group. So
each column is checked for all blobs of a schema in one call. A blob that fails a check here is
parsed again by `parse_group`, which alone decides whether it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from redrb.codec.layout import (
    Blob,
    GroupLayout,
    Piece,
    check_bytes,
    find_sections,
    parse_extras,
    parse_group,
    parse_shape,
    parse_tail,
)
from redrb.codec.schema import Field, parse_schema
from redrb.codec.wire import (
    INT64_RANGE,
    MAX_BLOB_BYTES,
    PREFIX,
    decoded_limit,
    malformed,
    unpack,
)
from redrb.errors import DecodeError
from redrb.experience.padding import Shape
from redrb.experience.status import Status

Head: TypeAlias = tuple[tuple[Field, ...], int, int, int]
"""A blob's columns, and where its header, extras and bodies begin."""
Draft: TypeAlias = tuple[int, GroupLayout, list[Any], int, bool]
"""Index of a blob in the call, its layout without columns, its header, where its bodies begin, and
whether it has no metadata but a policy version."""
Numbers: TypeAlias = Sequence[int]

_FEWEST = 2
_LONGEST_HEADER = 4096
"""Bytes; blobs with longer headers are parsed one at a time, which bounds memory."""
_ZEROS = (0,) * 5


@dataclass(slots=True)
class TableColumn:
    """One column of all groups of a table; every list has an entry for each group.

    Attributes:
        field: Its name and dtypes.
        shapes: Shape of each sample.
        shape: The one shape of all samples; None if they differ.
        totals: Elements of each sample.
        leads: Elements of the run at the start; None if no sample has a run.
        lead_values: The value of the run at the start.
        trails: Elements of the run at the end.
        trail_values: The value of the run at the end.
        counts: Elements in the body.
        starts: Where in the blob the body begins.
        ends: Where it ends.
    """

    field: Field
    shapes: Sequence[Shape]
    shape: Shape | None
    totals: Numbers
    leads: Numbers | None
    lead_values: Numbers
    trails: Numbers
    trail_values: Numbers
    counts: Numbers
    starts: Numbers = ()
    ends: Numbers = ()


@dataclass(slots=True)
class Table:
    """The pieces of `size` groups of one sample with one schema.

    Attributes:
        size: Groups.
        columns: Their columns.
        plain: Whether they have no metadata but policy versions.
    """

    size: int
    columns: list[TableColumn]
    plain: bool

    def pieces(self, row: int) -> list[list[Piece | None]]:
        """Return the pieces of one group, equal to those of `parse_group`."""
        return [
            [
                (
                    column.shapes[row],
                    column.counts[row],
                    column.leads[row] if column.leads else 0,
                    column.lead_values[row],
                    column.trails[row],
                    column.trail_values[row],
                    column.starts[row],
                    column.ends[row],
                )
            ]
            for column in self.columns
        ]


def parse_groups(blobs: Iterable[Blob]) -> list[GroupLayout | DecodeError]:
    """Check many blobs of untrusted bytes as `parse_group` does, only faster.

    Returns:
        For each blob its layout, or the error that `parse_group` raises for it.
    """
    blobs = list(blobs)
    found: list[GroupLayout | DecodeError | None] = [None] * len(blobs)
    for drafts in _drafts(blobs):
        try:
            _tabulate(drafts[0][1].fields, drafts)
        except DecodeError:
            continue
        for place, layout, *_ in drafts:
            found[place] = layout
    return [
        _parse_alone(blob) if layout is None else layout
        for layout, blob in zip(found, blobs, strict=True)
    ]


def _parse_alone(blob: Blob) -> GroupLayout | DecodeError:
    try:
        return parse_group(blob)
    except DecodeError as error:
        return error


def _drafts(blobs: Sequence[Blob]) -> Iterable[list[Draft]]:
    """Return the drafts of all blobs whose head can be read, grouped by schema."""
    alike: dict[int, list[Draft]] = {}
    heads: dict[bytes, Head] = {}  # by prefix and schema, of which few differ
    size = 0
    for place, blob in enumerate(blobs):
        try:
            check_bytes(blob)
            head = heads.get(bytes(blob[:size]))
            if head is None or not head[3] <= len(blob) <= MAX_BLOB_BYTES:
                head = _read_head(blob)
                size = head[1]
                heads[bytes(blob[:size])] = head
            draft = _draft(place, blob, head)
        except DecodeError:
            continue
        if draft is not None:
            alike.setdefault(id(head[0]), []).append(draft)
    return alike.values()


def _read_head(blob: Blob) -> Head:
    header_at, extras_at, body_at = find_sections(blob)
    fields = parse_schema(bytes(blob[PREFIX.size : header_at]))
    return fields, header_at, extras_at, body_at


def _draft(place: int, blob: Blob, head: Head) -> Draft | None:
    """Parse all of a blob but its columns; None for groups that this module does not parse."""
    fields, header_at, extras_at, body_at = head
    if not 2 < extras_at - header_at <= _LONGEST_HEADER:
        return None
    if not 0x93 <= blob[header_at] <= 0x9F or blob[header_at + 1] != 1:
        return None  # no short array of at least three elements, or no single sample
    header: list[Any] = unpack(blob[header_at:extras_at], "header")
    layout = GroupLayout()
    layout.blob = blob
    layout.nbytes = len(blob)
    layout.samples = 1
    layout.fields = fields
    plain = len(header) <= 4
    if not plain:
        parse_tail(layout, *header[3:7])
    else:
        version = header[3] if len(header) == 4 else None
        if version is not None and (type(version) is not int or version not in INT64_RANGE):
            return None
        layout.policy_versions = [version]
        layout.statuses = [Status.COMPLETED]
        layout.group_id = None
        layout.tags = [{}]
    if body_at > extras_at:
        plain = False
        layout.extras = parse_extras(blob[extras_at:body_at], 1)
    else:
        layout.extras = [{}]
    return place, layout, header, body_at, plain


def _tabulate(fields: tuple[Field, ...], drafts: Sequence[Draft]) -> None:
    """Fill in the columns of all layouts; raises DecodeError if a check fails for one of them."""
    if len(drafts) < _FEWEST or not fields:
        malformed("too few groups or no columns")
    _, layouts, headers, body_ats, plain = zip(*drafts, strict=True)
    entries = [header[1] for header in headers]
    if not _all(entries, list) or set(map(len, entries)) != {len(fields)}:
        malformed("its header and its schema have different columns")
    shapes = _Shapes([header[2] for header in headers])
    columns = [
        _column(field, column_entries, shapes)
        for field, column_entries in zip(fields, zip(*entries, strict=True), strict=True)
    ]
    decoded = _place(columns, body_ats, [layout.nbytes for layout in layouts])
    table = Table(len(drafts), columns, all(plain))
    for row, layout in enumerate(layouts):
        layout.rows = table
        layout.row = row
        layout.decoded_bytes = decoded[row]


def _all(values: Iterable[object], kind: type) -> bool:
    """Return whether the type of all values is exactly `kind`; a bool is no int."""
    return set(map(type, values)) <= {kind}


class _Shapes:
    """The shapes in the headers of all drafts."""

    def __init__(self, listed: list[Any]) -> None:
        self.rows = len(listed)
        self.same = listed.count(listed[0]) == len(listed)  # implies that all are lists if one is
        checked = listed[:1] if self.same else listed
        if not _all(checked, list) or not _all(chain.from_iterable(checked), list):
            malformed("its shapes are no lists")
        if not _all(chain.from_iterable(chain.from_iterable(listed)), int):
            malformed("a dimension is no int")
        if self.same:
            self._parsed = [list(map(parse_shape, listed[0]))]
        else:
            memo: dict[Shape, tuple[Shape, int]] = {}
            self._parsed = [[_remember(memo, shape) for shape in row] for row in listed]

    def find(self, refs: Numbers) -> tuple[Sequence[Shape], Shape | None, Numbers]:
        """Return each sample's shape, the one shape of all or None, and each sample's elements."""
        first = refs[0]
        if self.same and refs.count(first) == self.rows:
            if not 0 <= first < len(self._parsed[0]):
                malformed("a reference is beyond the shapes")
            shape, count = self._parsed[0][first]
            return (shape,) * self.rows, shape, (count,) * self.rows
        if min(refs) < 0:
            malformed("a reference to a shape is negative")
        parsed = self._parsed * self.rows if self.same else self._parsed
        try:
            found = [row[ref] for row, ref in zip(parsed, refs, strict=True)]
        except IndexError:
            malformed("a reference is beyond the shapes")
        shapes = [shape for shape, _ in found]
        one = shapes[0] if shapes.count(shapes[0]) == len(shapes) else None
        return shapes, one, [count for _, count in found]


def _remember(memo: dict[Shape, tuple[Shape, int]], shape: list[int]) -> tuple[Shape, int]:
    key = tuple(shape)
    found = memo.get(key)
    if found is None:
        found = memo[key] = parse_shape(shape)
    return found


def _column(field: Field, entries: Sequence[Any], shapes: _Shapes) -> TableColumn:
    """Return one column with its shapes, runs and the elements in each body."""
    nothing = (0,) * len(entries)
    kinds = set(map(type, entries))
    if kinds == {int}:
        found, one, counts = shapes.find(entries)
        return TableColumn(field, found, one, counts, None, nothing, nothing, nothing, counts)
    refs, *parts = _spread(entries, kinds)
    for lengths, values in zip(parts[::2], parts[1::2], strict=True):
        _check_runs(field, lengths, values)
    found, one, totals = shapes.find(refs)
    leads, lead_values = parts[:2] if parts else (nothing, nothing)
    counts = [total - lead for total, lead in zip(totals, leads, strict=True)]
    trails, trail_values = parts[2:] if len(parts) > 2 else (nothing, nothing)
    if len(parts) > 2:
        counts = [count - trail for count, trail in zip(counts, trails, strict=True)]
    if min(counts) < 0:
        malformed(f"column {field.name} has runs longer than its samples")
    return TableColumn(field, found, one, totals, leads, lead_values, trails, trail_values, counts)


def _spread(entries: Sequence[Any], kinds: set[type]) -> list[tuple[Any, ...]]:
    """Return entries as columns: shapes, leads, lead values, trails and trail values.

    Runs that no entry has are left out.
    """
    if kinds != {list}:
        entries = [entry if type(entry) is list else [entry] for entry in entries]
    lengths = set(map(len, entries))
    longest = max(lengths)
    if min(lengths) < 1 or longest > 5:
        malformed("an entry is too short or too long")
    longest |= 1  # a length without its value has the value 0
    if lengths != {longest}:
        missing = [list(_ZEROS[size:longest]) for size in range(6)]
        entries = [
            entry if len(entry) == longest else entry + missing[len(entry)] for entry in entries
        ]
    if not _all(chain.from_iterable(entries), int):
        malformed("an element of an entry is no int")
    return list(zip(*entries, strict=True))


def _check_runs(field: Field, lengths: Numbers, values: Numbers) -> None:
    if min(lengths) < 0:
        malformed(f"a run of column {field.name} has a negative length")
    distinct = set(values)
    if min(distinct) < field.dtype.low or max(distinct) > field.dtype.high:
        malformed(f"a run of column {field.name} has a value beyond its dtype")


def _place(columns: Sequence[TableColumn], body_ats: Iterable[int], nbytes: list[int]) -> list[int]:
    """Set where each body lies; return the bytes of all tensors of each group."""
    ends = list(body_ats)
    for column in columns:
        column.starts = ends
        ends = _advance(ends, column)
        column.ends = ends
    alike = sum(
        column.totals[0] * column.field.dtype.itemsize
        for column in columns
        if column.shape is not None
    )
    decoded = [alike] * len(ends)
    for column in columns:
        if column.shape is None:
            size = column.field.dtype.itemsize
            decoded = [
                amount + total * size for amount, total in zip(decoded, column.totals, strict=True)
            ]
    if ends != nbytes:
        malformed("its columns do not end where it ends")
    if max(decoded) > decoded_limit(min(ends)):
        malformed("a group may decode to too many bytes")
    return decoded


def _advance(starts: list[int], column: TableColumn) -> list[int]:
    """Return where the bodies of a column end."""
    width = column.field.wire_size
    if column.leads is None and column.shape is not None:
        size = column.counts[0] * width if width else (column.counts[0] + 7) >> 3
        return [start + size for start in starts]
    if not any(column.counts):
        return starts
    if width:
        return [start + count * width for start, count in zip(starts, column.counts, strict=True)]
    return [start + ((count + 7) >> 3) for start, count in zip(starts, column.counts, strict=True)]
