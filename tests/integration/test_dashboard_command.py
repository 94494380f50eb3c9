"""`redrb dashboard`: where it is served, to whom, and that it ends at once."""

from __future__ import annotations

import json
import signal
import socket
import sys
from typing import Any

import httpx
import pytest

from redrb import ExperienceStream
from redrb.cli.__main__ import main
from redrb.connection import Client
from redrb.watch.page.guard import TOKEN_HEADER
from tests.dashboards import TOKEN, Dashboard
from tests.samples import numbered


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_at_once_while_pages_listen(dashboard: Dashboard, number: signal.Signals) -> None:
    with httpx.stream("GET", f"{dashboard.url}events", timeout=10) as page:
        lines = page.iter_lines()
        assert next(lines) == "event: history"
        assert dashboard.end(number) == (0, "")  # uvicorn complains of requests that it cuts
        assert [*lines]  # the stream has ended, and was not cut


def test_dead_letters_are_listed_and_requeued_with_the_token(
    dashboard: Dashboard, owner: Client, namespace: str
) -> None:
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(number)] for number in range(4)])
        stream.take(4, timeout=5).reject("loss is nan")
        letters = httpx.get(f"{dashboard.url}api/letters?task=math").json()
        assert len(letters) == 4
        assert {letter["reason"] for letter in letters} == {"loss is nan"}
        wanted = {"task": "math", "group": "default", "ids": [one["id"] for one in letters]}
        refused = httpx.post(f"{dashboard.url}api/requeue", json=wanted)
        assert refused.status_code == 403
        assert stream.stats().ledger.dead == 4
        headers = {TOKEN_HEADER: TOKEN}
        for requeued in (4, 0):
            answer = httpx.post(f"{dashboard.url}api/requeue", json=wanted, headers=headers)
            assert answer.json() == {"requeued": requeued}
        assert stream.stats().ledger.waiting == 4
    missing = httpx.get(f"{dashboard.url}api/letters?task=mat")
    assert missing.status_code == 404
    assert "similar names: 'math'" in missing.json()["error"]


def test_a_port_in_use_is_named(real_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["dashboard", "--url", real_url, "--port", port]) == 2
    assert f"127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "is reached by other machines"),
        (["--host", "::"], "is reached by other machines"),
        (["--port", "70000"], "must be between 0 and 65535"),
        (["--host", "256.0.0.1", "--expose"], "cannot be served at 256.0.0.1"),
    ],
)
def test_wrong_places_are_refused(
    words: list[str], message: str, real_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", "--url", real_url, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_redis_that_is_away_is_an_error_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
        assert main(["dashboard", "--url", url, "--port", "0"]) == 1
    assert "redrb: " in capsys.readouterr().err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("redrb.watch.page.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["dashboard", "--port", "0"]) == 2
    assert "uvicorn is not installed: pip install 'starlette>=" in capsys.readouterr().err


def test_without_json_people_get_url_and_token(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    real_url: str,
    namespace: str,
) -> None:
    async def served(*given: Any) -> None:
        given[-1]()

    monkeypatch.setattr("redrb.watch.page.server.serve", served)
    words = ["dashboard", "--url", real_url, "--namespace", namespace, "--port", "0"]
    tokens = set()
    for _ in range(2):
        assert main(words) == 0
        shown, token = capsys.readouterr().out.splitlines()
        assert shown.startswith("http://127.0.0.1:")
        tokens.add(token)
    assert len(tokens) == 2  # each start has another one
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"url", "token"}
