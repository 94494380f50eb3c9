"""Encodes groups of samples to bytes and decodes them; `docs/wire-format.md` has the format."""

from redrb.codec.decode import decode_batch, decode_items
from redrb.codec.encode import EncodedGroup, NarrowFloats, encode_experience, encode_groups
from redrb.codec.layout import GroupLayout, parse_group, parse_groups
from redrb.codec.misfits import misfits

__all__ = [
    "EncodedGroup",
    "GroupLayout",
    "NarrowFloats",
    "decode_batch",
    "decode_items",
    "encode_experience",
    "encode_groups",
    "misfits",
    "parse_group",
    "parse_groups",
]
