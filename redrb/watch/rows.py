"""Reads rows of a table for `redrb inspect`: their tags, and what their columns are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redrb.codec.dtypes import DTYPES
from redrb.codec.wire import MAX_RANK
from redrb.connection import Client
from redrb.errors import DecodeError
from redrb.table.index import Index
from redrb.table.payload import Wanted, read
from redrb.table.values import TagReader

_HEAD_BYTES = 3 + 4 * MAX_RANK
_KINDS = ("tensor", "array", "object", "pickle")


@dataclass(frozen=True, slots=True)
class ColumnView:
    """A column of a row.

    Attributes:
        kind: "tensor", "array", "object" or "pickle"; "gone": its value is not stored any more.
        dtype, shape: Of a tensor or an array.
        nbytes: Bytes of the value as it is stored.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.dtype else self.kind


@dataclass(frozen=True, slots=True)
class RowView:
    """A row of a table."""

    key: str
    number: int
    tags: Mapping[str, Any]
    columns: tuple[ColumnView, ...]


def read_rows(
    client: Client, table: str, namespace: str, keys: Sequence[str], count: int
) -> list[RowView]:
    """Return rows with these keys, those that are there; without keys those that changed last.

    Raises:
        UnknownTask: There is no such table.
    """
    index = Index(client, table, namespace, {}, create=False)
    stored, read_tags = f"{index.keys.prefix}tags", TagReader().read
    if not keys:
        newest = index.client.execute("ZREVRANGE", f"{index.keys.prefix}changes", 0, count - 1)
        packed = index.client.execute("HMGET", stored, *newest) if newest else []
        keys = [read_tags(each)[0] for each in packed if each]
    rows = {key: row for key, row in zip(keys, index.find(keys), strict=True) if row}
    numbers = [row.number for row in rows.values()]
    packed = index.client.execute("HMGET", stored, *numbers) if numbers else []
    tags = dict(map(read_tags, filter(None, packed)))
    places = [(key, name, place) for key, row in rows.items() for name, place in row.places.items()]
    wanted = [
        Wanted(place.key, place.begin, min(place.length, _HEAD_BYTES), whole=False)
        for *_, place in places
    ]
    columns: dict[str, list[ColumnView]] = {key: [] for key in rows}
    for (key, name, place), head in zip(places, read(client, wanted), strict=True):
        columns[key].append(_column(name, place.length, head))
    return [
        RowView(key, row.number, tags.get(key, {}), tuple(columns[key]))
        for key, row in rows.items()
    ]


def _column(name: str, nbytes: int, head: bytes | None) -> ColumnView:
    if not head:
        return ColumnView(name, "gone", "", (), nbytes)
    try:
        kind = _KINDS[head[0]]
        if kind not in ("tensor", "array"):
            return ColumnView(name, kind, "", (), nbytes)
        shape = memoryview(head)[3 : 3 + 4 * head[2]]
        sizes = tuple(
            int.from_bytes(shape[at : at + 4], "little") for at in range(0, len(shape), 4)
        )
        return ColumnView(name, kind, DTYPES[head[1]].name, sizes, nbytes)
    except IndexError:
        raise DecodeError(f"column {name!r} holds no value of a table") from None
