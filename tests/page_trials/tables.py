"""Trials of pages of tables: rows that are listed, found, removed, claimed and restored."""

from __future__ import annotations

import pytest

import redrb
from redrb.errors import ConfigError
from redrb.lua.pages import PAGES
from redrb.table.index import Index
from tests.page_trials.bench import Bench
from tests.table_audit import audit_table


def opened(bench: Bench) -> redrb.Table:
    return redrb.Table(bench.client, "train", namespace=bench.namespace, retain="checkpoint")


def names(count: int) -> list[str]:
    return [f"row{number}" for number in range(count)]


def filled(bench: Bench, count: int) -> redrb.Table:
    table = opened(bench)
    for name in names(count):
        table.put([name], {"x": [name]})
    return table


def rows_live_and_go(bench: Bench, count: int) -> None:
    """Each call that goes through rows goes through all of them, once."""
    table = filled(bench, count)
    table.register("actor", ["x"])
    table.claim("actor", count=count, timeout=0).ack()
    assert table.tags().rows.keys() == set(names(count))
    assert table.produced(["x"]) == count
    for later in ("keep", "drop"):
        table.mark("m")
        look = table.tags()
        table.put(["late"], {"x": [1]})
        table.put(names(1), {"y": [1]})
        assert table.clear() == count + 1
        assert set(table.tags(look.change).gone) == {*names(count), "late"}
        assert table.restore("m", later).back == (count + 1 if later == "keep" else count)
        table.clear(["late"])
        assert table.consumed("actor") == count
        table.restore("m")
        table.clear(["late"])
    audit_table(bench.client, table)
    table.clear()
    for name in ("n", "o", "p"):
        table.mark(name)
    assert table.stats().counts.retained == 0
    audit_table(bench.client, table)
    assert table.delete() == 0


def a_table_is_deleted(bench: Bench, count: int) -> None:
    """Rows that are there, and those that are retained."""
    table = filled(bench, 2 * count)
    table.register("actor", ["x"])
    table.mark("m")
    table.clear(names(count))
    assert table.delete() == count
    left = bench.client.execute("KEYS", f"redrb:{{{bench.namespace}:table:*")
    assert {name for name in left if not name.endswith(b":removed")} == set()


def rows_put_and_found(bench: Bench, count: int) -> None:
    """A put of more rows is refused, and that many are found at once."""
    page = PAGES["put_rows"]
    for module in ("table", "index"):
        bench.patch.setattr(f"redrb.table.{module}.MOST_ROWS", page)
    found, looks = Index._find, []
    bench.patch.setattr(Index, "_find", lambda *given: looks.append(0) or found(*given))
    table = opened(bench)
    if count > page:
        with pytest.raises(ConfigError, match="at most"):
            table.put(names(count), {"x": names(count)})
        for name in names(count):
            table.put([name], {"x": [name]})
    else:
        table.put(names(count), {"x": names(count)})
    assert table.get(names(count))["x"] == names(count)
    assert len(looks) == -(-count // page)
    audit_table(bench.client, table)


def columns_added(bench: Bench, count: int) -> None:
    """A table has so many columns, and a put of a further one changes nothing."""
    table, page = opened(bench), PAGES["columns"]
    for number in range(min(count, page)):
        table.put(["a"], {f"c{number}": [number]})
    if count > page:
        with pytest.raises(ConfigError, match="columns"):
            table.put(["a", "b"], {"c0": [9, 9], "more": [1, 1]})
    assert len(table.get(["a"])) == min(count, page)
    assert table.tags().rows.keys() == {"a"}
    audit_table(bench.client, table)


def tasks_registered(bench: Bench, count: int) -> None:
    """A table has so many tasks, each of which claims all rows."""
    table, page = filled(bench, 2), PAGES["claims"]
    for number in range(min(count, page)):
        table.register(f"task{number}", ["x"])
        assert len(table.claim(f"task{number}", count=2, timeout=0)) == 2
    if count > page:
        with pytest.raises(ConfigError, match="no more"):
            table.register("more", ["x"])
    table.clear()
    audit_table(bench.client, table)


def groups_claimed(bench: Bench, count: int) -> None:
    """A group has so many rows."""
    table, page = filled(bench, 2 * count), PAGES["claim_size"]
    if count > page:
        with pytest.raises(ConfigError, match="group_size"):
            table.register("groups", ["x"], count)
        count = page
    table.register("groups", ["x"], count)
    with table.claim("groups", count=2 * count, timeout=0) as claim:
        assert claim.keys == tuple(names(2 * count))
    table.clear()
    audit_table(bench.client, table)


def removals_remembered(bench: Bench, count: int) -> None:
    """A look from before the removals that a table remembers is whole."""
    table, page = filled(bench, count + 1), PAGES["gone_kept"]
    look = table.tags()
    for name in names(count):
        table.clear([name])
    after = table.tags(look.change)
    assert after.whole is (count > page)
    assert after.whole or set(after.gone) == set(names(count))
    stored = bench.client.execute("ZCARD", f"redrb:{{{bench.namespace}:table:train}}:gone")
    assert stored == min(count, page)


def values_in_requests(bench: Bench, count: int) -> None:
    """Values are stored, read and deleted in several requests."""
    bench.patch.setattr("redrb.table.payload.CHUNK_BYTES", 20)
    table = opened(bench)
    table.put(names(count), {"x": [bytes([number]) * 15 for number in range(count)]})
    assert [value[0] for value in table.get(names(count))["x"]] == list(range(count))
    audit_table(bench.client, table)
