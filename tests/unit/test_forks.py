"""What a forked child starts anew."""

from __future__ import annotations

import gc
import threading

from redrb import forks
from redrb.forks import guard, in_child
from tests.scenes import holds_in_a_child


class Counted:
    """Notes the calls of `begin` in a list."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls
        in_child(self.begin)

    def begin(self) -> None:
        self._calls.append(self._name)


def test_living_objects_begin_anew_in_a_child_in_the_order_in_which_they_were_made():
    calls: list[str] = []
    kept = [Counted("first", calls), Counted("dropped", calls), Counted("second", calls)]
    del kept[1]
    gc.collect()
    assert holds_in_a_child(lambda: calls == ["first", "second"])
    assert calls == []


def test_a_child_of_a_child_begins_anew_once_more():
    calls: list[str] = []
    kept = Counted("one", calls)
    assert holds_in_a_child(lambda: holds_in_a_child(lambda: calls == ["one", "one"]))
    del kept


def test_the_mark_of_a_child_is_its_own():
    before = forks.process
    assert holds_in_a_child(lambda: forks.process is not before)
    assert forks.process is before


def test_a_fork_waits_for_the_guard_and_its_child_can_take_it():
    held, forked = threading.Event(), threading.Event()

    def work():
        with guard:
            held.set()
            assert not forked.wait(0.2)

    thread = threading.Thread(target=work)
    thread.start()
    assert held.wait(10)
    assert holds_in_a_child(lambda: not forked.set() and guard.acquire(blocking=False))
    thread.join(10)
