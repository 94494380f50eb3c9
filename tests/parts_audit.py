"""Compares the counters of groups in parts with what Redis holds of them."""

from __future__ import annotations

import msgpack

from redrb import ExperienceStream
from redrb.connection.transport import Pipeline


def audit_parts(stream: ExperienceStream) -> None:
    """Assert that records, parts, times and counters agree; others may work meanwhile."""
    store, look = stream._task.store, Pipeline()
    prefix = store.keys.prefix
    look.add("MULTI")
    for command in ("HGETALL parts", "HGETALL part_records", "HGETALL part_blobs"):
        word, name = command.split()
        look.add(word, f"{prefix}{name}")
    look.add("ZRANGE", f"{prefix}part_due", 0, -1)
    look.add("HKEYS", f"{prefix}part_ends")
    look.add("ZRANGE", f"{prefix}part_ended", 0, -1)
    look.add("EXEC")
    *_, replies = store.client.exchange(look)
    counters, packed, blobs, due, ends, ended = replies
    counts = {name.decode(): int(value) for name, value in zip(*[iter(counters)] * 2, strict=True)}
    fields = dict(zip(*[iter(blobs)] * 2, strict=True))
    records = {key: msgpack.unpackb(value) for key, value in zip(*[iter(packed)] * 2, strict=True)}
    assert sorted(due) == sorted(records)
    assert sorted(ends) == sorted(ended)
    assert not records.keys() & set(ends)
    expected = set()
    for key, record in records.items():
        here = {b"%d %b" % (at, key) for at, there in enumerate(record["have"]) if there == "1"}
        assert len(here) == record["count"] > 0
        assert record["whole"] == (len(here) == record["of"])
        assert sum(len(fields[field]) for field in here) == record["bytes"]
        expected |= here
    assert fields.keys() == expected, "parts without a record"
    assert counts.get("waiting", 0) == len(fields)
    assert counts.get("bytes", 0) == sum(map(len, fields.values()))
