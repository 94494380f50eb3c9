"""The codec's kernel in plain Python: the specification in code, used where nothing is compiled.

It does the same as `_encode.c`, `_decode.c` and `_gather.c`, is held to the same tests, and is
written to be read: one sample and one column at a time. `docs/reference/wire-format.md` describes
the bytes.
"""

from redrb.codec.plain.cells import gather
from redrb.codec.plain.encoding import collect, encode
from redrb.codec.plain.group import Group, extent, fill, parse

__all__ = ["Group", "collect", "encode", "extent", "fill", "gather", "parse"]
