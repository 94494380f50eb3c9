"""A job that restarts with other flags: its task takes them over, and keeps what a user has set."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from redrb import Client, ExperienceStream, TaskMismatch
from redrb.recipe.task_settings import settings_of_maker, settings_of_trainer
from redrb.stream import TaskSettings
from tests.counting_recipe import Counting
from tests.samples import numbered

Worker = Callable[[Client, Counting], TaskSettings]


@pytest.fixture
def start(client: Client, namespace: str) -> Callable[..., ExperienceStream]:
    """Open the task as a worker of the recipe does, with these flags."""

    def open_as(worker: Worker, **flags: object) -> ExperienceStream:
        recipe = Counting(namespace=namespace, **flags)  # type: ignore[arg-type]
        settings = worker(client, recipe)
        return ExperienceStream(client, recipe.task_name, namespace=namespace, implied=settings)

    return open_as


def test_a_run_with_other_flags_goes_on_and_keeps_what_a_user_has_set(
    start: Callable[..., ExperienceStream], caplog: pytest.LogCaptureFixture
) -> None:
    with start(settings_of_maker, limit=64) as early, start(settings_of_trainer, limit=64):
        assert early.settings().values["limit"] == "64"
        with start(settings_of_trainer, limit=32, max_staleness=1) as again:
            values = again.settings().values
            assert (values["limit"], values["max_staleness"]) == ("32", "1")
        early.configure(max_staleness=4)
        assert not caplog.records
        for worker in (settings_of_trainer, settings_of_maker):  # as a supervisor restarts them
            with start(worker, limit=32, max_staleness=1) as restarted:
                values = restarted.settings().values
                assert (values["limit"], values["max_staleness"]) == ("32", "4")
    first, second = caplog.messages
    assert "has max_staleness=4, which stays" in first
    assert "redrb set counting max_staleness=1 --namespace" in first
    assert "has max_staleness=4, and this maker was given 1" in second


def test_a_maker_with_other_flags_changes_nothing_and_says_so(
    start: Callable[..., ExperienceStream], caplog: pytest.LogCaptureFixture
) -> None:
    with start(settings_of_trainer, limit=64) as stream, caplog.at_level(logging.WARNING):
        before = stream.settings()
        with start(settings_of_maker, max_staleness=8, order="stalest"):
            assert stream.settings() == before
    said = "\n".join(caplog.messages)
    for part in ("limit=64", "max_staleness=2", "order=admission"):
        assert f"has {part}" in said


def test_an_order_that_stored_groups_cannot_have_is_refused(
    start: Callable[..., ExperienceStream],
) -> None:
    with start(settings_of_trainer, max_staleness=-1) as stream:
        stream.put(numbered(1))
        with pytest.raises(TaskMismatch, match="order is 'fifo', not 'admission'"):
            start(settings_of_trainer)
        stream.take(1, timeout=0).ack()
        start(settings_of_trainer).close()
        assert stream.settings().values["order"] == "admission"
