"""Which columns a group has; few different schemas occur, so most are parsed once."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from redrb.codec.dtypes import DTYPES, DType
from redrb.codec.wire import MAX_COLUMNS, MAX_NAME_BYTES, malformed
from redrb.experience.fields import TENSOR_FIELDS
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
