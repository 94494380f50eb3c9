"""`scan`: finds keys by a pattern, page by page."""

from __future__ import annotations

from collections.abc import Iterator

from redrb.connection.client import Client


def scan(client: Client, pattern: str) -> Iterator[bytes]:
    """Yield the keys of one server that match a pattern; a key may come twice."""
    cursor = b""
    while cursor != b"0":
        cursor, found = client.execute("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", 1000)
        yield from found
