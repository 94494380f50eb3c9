"""What must hold of a table at any time when nobody uses it."""

from __future__ import annotations

import redrb
from redrb.connection import Client
from redrb.lua.records import read_record, sizes_of, value_of
from redrb.table.saving import SavedRow


def keys_of(client: Client, table: redrb.Table) -> list[bytes]:
    """Return all keys of a table, not of its server: there keys of others expire at any time."""
    pattern = f"{table._index.keys.prefix.removesuffix('}:')}*"
    return sorted(name for node in client.primaries() for name in node.execute("KEYS", pattern))


def values_of(client: Client, table: redrb.Table) -> tuple[set[bytes], set[bytes]]:
    """Return the keys of the values in Redis, and of those that rows or the trash name."""
    keys = table._index.keys
    stored = {
        name
        for node in client.primaries()
        for name in node.execute("KEYS", f"{keys.prefix.removesuffix('}:')}:*")
    }
    index = table._index.client
    named = set(index.execute("SMEMBERS", keys.trash))
    for record in index.execute("HVALS", keys.rows):
        for segment in read_record(record)[1]:
            named.add(value_of(keys, segment).encode())
    return stored, named


def audit_table(client: Client, table: redrb.Table) -> None:
    """Check the ledgers of a table, its counters, and that each value belongs to a row."""
    stats = table.stats()
    counts, (stored, named) = stats.counts, values_of(client, table)
    assert counts.made == counts.rows + counts.cleared + counts.dropped, counts
    assert all(task.ledger.balanced for task in stats.tasks.values()), stats.tasks
    assert stored == named, (stored - named, named - stored)
    keys, index = table._index.keys, table._index.client
    for record in index.execute("HVALS", keys.rows):
        assert read_record(record)[0] == SavedRow(0, record, b"", 0, 0, {}, {}).head
    numbers = set(index.execute("HVALS", f"{keys.prefix}keys"))
    assert len(numbers) == counts.rows
    assert numbers == set(index.execute("ZRANGE", f"{keys.prefix}changes", 0, -1))
    kept = set(index.execute("ZRANGE", keys.cleared, 0, -1))
    assert set(index.execute("HKEYS", keys.rows)) == numbers | kept
    assert set(index.execute("HKEYS", f"{keys.prefix}tags")) == numbers | kept
    sizes = {
        number: sum(sum(sizes_of(segment)) for segment in read_record(record)[1])
        for number, record in zip(*[iter(index.execute("HGETALL", keys.rows))] * 2, strict=True)
    }
    assert counts.bytes == sum(sizes[number] for number in numbers)
    assert counts.retained_bytes == sum(sizes[number] for number in kept)
