"""Partitions on nodes that cannot be reached are left out, and logged as other outages are."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from redrb.errors import StoreUnavailable
from redrb.stream.task.reach import Reach

_numbers = itertools.count()


def stores(*nodes: str) -> list[Any]:
    task = f"math-{next(_numbers)}"  # outages are shared in a process
    return [SimpleNamespace(task=task, client=SimpleNamespace(node=node)) for node in nodes]


def test_a_node_is_logged_once_and_when_it_is_back(caplog):
    parts = stores("a:1", "b:1", "a:1")
    reach = Reach(parts)
    for number in (0, 2, 0):
        reach.lose(number, StoreUnavailable("refused", where="a:1"))
    assert (reach.away, reach.near(), reach.all_away) == ((0, 2), [1], False)
    reach.find(1)
    assert reach.away == (0, 2)
    said = f"task {parts[0].task!r}: partitions on a:1 are left out"
    assert caplog.messages == [f"{said}: refused"]
    reach.find(2)
    assert reach.away == ()
    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith("recovered after")
    assert caplog.messages[1].endswith(said)


def test_a_node_whose_partitions_moved_to_another_one_is_no_outage(caplog):
    parts = stores("a:1", "b:1")
    reach = Reach(parts)
    reach.lose(0, StoreUnavailable("refused", where="a:1"))
    parts[0].client.node = "c:1"
    reach.find(1)
    assert caplog.messages[-1].startswith("recovered after")
