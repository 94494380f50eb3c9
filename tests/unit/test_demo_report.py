"""The table that a demo ends with."""

from __future__ import annotations

import io

from rich.console import Console

import redrb
from redrb.launch.history import History
from redrb.launch.report import summary, table
from tests.samples import numbered


def test_the_table_says_what_waiting_groups_are(namespace: str) -> None:
    history = History()
    history.reward_first, history.reward_last = 0.1, 0.9
    with (
        redrb.connect(f"fake://{namespace}") as client,
        redrb.ExperienceStream(client, "sort", namespace=namespace) as stream,
    ):
        stream.put(numbered(1))
        stats = stream.stats()
    text = io.StringIO()
    Console(file=text, width=100).print(table(summary(1.0, history, stats), history, stats))
    assert "groups waiting, made but not trained by the end" in text.getvalue()
