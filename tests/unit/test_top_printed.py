"""Pictures of `redrb top` that are printed: when each is printed, and with which figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from redrb.cli import top
from redrb.watch.state.history import History
from redrb.watch.state.observer import View
from tests.sample_state import sample_state


class Observer:
    """Returns prepared views, the last of them again and again."""

    def __init__(self, *views: View) -> None:
        self.history = History()
        self.timeouts: list[float] = []
        self._views: Iterator[View] = iter(views)
        self._newest = views[0]

    def wait(self, _number: int, timeout_s: float, *, error: str = "") -> View:
        self.timeouts.append(timeout_s)
        if len(self.timeouts) == 6:
            raise KeyboardInterrupt
        self._newest = next(self._views, self._newest)
        return self._newest


def printed(observer: Observer, *words: str) -> None:
    options = argparse.Namespace(task="", once=True, json=True, watch=None, namespace="default")
    if words:
        options.once, options.watch = False, float(words[-1])
    client: Any = argparse.Namespace(where="there")
    top._print(observer, client, options)


def view_without_rates(number: int, *missing: str) -> View:
    """Return a view in which live workers with some names have no rate."""
    state = sample_state()
    code, math = state.tasks
    workers = (
        replace(each, groups_per_s=None) if each.name in missing else each for each in math.workers
    )
    return View(replace(state, tasks=(code, replace(math, workers=tuple(workers)))), number)


def test_one_picture_waits_for_the_rates_of_live_workers(capsys):
    names = [each.name for each in sample_state().tasks[1].workers if each.life == "live"]
    dead = [each.name for each in sample_state().tasks[1].workers if each.life == "dead"]
    views = [
        *(view_without_rates(number, *names[:2]) for number in (1, 2)),
        view_without_rates(3, names[1]),
        view_without_rates(4, *dead),
        view_without_rates(5),
    ]
    printed(Observer(*views))
    shown = json.loads(capsys.readouterr().out)
    assert shown["number"] == 4
    rates = {one["name"]: one["groups_per_s"] for one in shown["state"]["tasks"][1]["workers"]}
    assert None not in (rates[name] for name in names)


def test_one_picture_does_not_wait_for_ever(monkeypatch, capsys):
    monkeypatch.setattr(top, "_RATES_S", 0.0)
    name = sample_state().tasks[1].workers[0].name
    printed(Observer(view_without_rates(1, name), view_without_rates(2, name)))
    assert json.loads(capsys.readouterr().out)["number"] == 2


def test_while_redis_is_away_a_picture_is_printed_at_each_interval(capsys):
    away = replace(view_without_rates(2), error="no answer", age_s=3.0)
    observer = Observer(view_without_rates(1), view_without_rates(2), away)
    with pytest.raises(KeyboardInterrupt):
        printed(observer, "--watch", "10")
    *_, line = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["error"], json.loads(line)["age_s"]) == ("no answer", 3.0)
    assert min(observer.timeouts[2:3]) > 10  # no picture twice while the next look comes
    assert observer.timeouts[3:] == [10, 10, 10]
