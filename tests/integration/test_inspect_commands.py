"""`redrb inspect`: what they print, their exit status, and a Redis that stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import redrb
from redrb import ExperienceStream
from redrb.connection import Client
from redrb.environment import PREFIX, child_environment
from redrb.errors import StoreUnavailable
from redrb.watch.groups import Browser, Choice
from tests.samples import numbered
from tests.servers import programs

ONE = list(programs())[:1]
"""One server is enough where only the command is tested."""


def test_inspect_shows_rows_and_everything_of_a_group(store, namespace, run, tmp_path):
    words = {"zero": 0, "one": 1, "two": 2, "three": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="zero"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    with ExperienceStream(store, "math", namespace=namespace, tags=["source"]) as stream:
        stream.put([numbered(1), numbered(2)], policy_version=3, tags={"source": "a"})
        stream.put(numbered(-1, extras={"text": "\x1b[2Jgone"}), tags={"source": "b"})
        stream.take(1, timeout=0)
        status, out, err = run("inspect", "math")
        assert (status, err) == (0, "")
        head, second, first = (line.split() for line in out.splitlines())
        assert head[:4] == ["id", "state", "samples", "size"]
        assert second[:3] == ["2", "waiting", "1"]
        assert first[:3] == ["1", "leased", "2"]
        assert first[-2:] == [f"{os.uname().nodename}-{os.getpid()}", "source=a"]
        assert first[-6:-2] == ["1", "to", "2", "by"]
        _, out, _ = run("inspect", "math", 2, "--tokenizer", tmp_path)
        assert "\N{REPLACEMENT CHARACTER}[2Jgone" in out
        assert "\x1b" not in out
        assert "response   two three" in out
        _, out, _ = run("inspect", "math", "--json", "--where", '{"source": "b"}')
        assert [group["id"] for group in json.loads(out)["groups"]] == [2]
        _, out, _ = run("inspect", "math", "--worst", 1, "--json")
        assert json.loads(out)["groups"][0]["reward"] == -1.0
        status, _, err = run("inspect", "math", 2, 77)
        assert (status, "not stored in task 'math': 77." in err) == (2, True)
        keep = f"`redrb export math FOLDER --namespace {namespace}` writes what is stored"
        assert keep in err
        assert run("inspect", "math", "--status", "archived")[2].endswith("has no such groups.\n")
        assert run("inspect", "math", "--dead")[2].endswith("has no such groups.\n")
        missing = ["--tokenizer", tmp_path / "x"]
        for wrong in (["--where", "{"], ["--count", 0], missing, [1, "--dead"]):
            assert run("inspect", "math", *wrong)[0] == 2
        assert run("inspect", "maths")[0] == 2


def followed(namespace: str, *more: str) -> list[str]:
    """Return the command that follows the task."""
    command = [sys.executable, "-m", "redrb.cli", "inspect", "math", "--follow", *more]
    return [*command, "--namespace", namespace]


def test_follow_ends_after_its_count_or_by_ctrl_c(store, namespace, run):
    with ExperienceStream(store, "math", namespace=namespace) as stream:
        stream.put(numbered(0))
        environment = child_environment(without=PREFIX, REDRB_URL=store.url)
        for json_too, ended in ((True, False), (False, True)):
            more = [*(["--json"] if json_too else []), *(["--count", "1"] if ended else [])]
            follow = subprocess.Popen(
                followed(namespace, *more), env=environment, stdout=subprocess.PIPE, text=True
            )
            try:
                while not _blocked(store):
                    assert follow.poll() is None
                stream.put(numbered(4), policy_version=3)
                if json_too:
                    (group,) = json.loads(follow.stdout.readline())["groups"]
                    assert (group["reward"], group["state"]) == (4.0, "waiting")
                    follow.send_signal(signal.SIGINT)
                    assert follow.wait(20) == 130
                else:
                    head, row = (line.split() for line in follow.stdout)
                    assert head[:4] == ["id", "state", "samples", "size"]
                    assert (row[0], row[5], row[7]) == ("3", "3", "4")
                    assert follow.wait(20) == 0
            finally:
                follow.kill()
                follow.wait()
                follow.stdout.close()
    for wrong in (["--count", 0], [1], ["--dead"], ["--best", 2], ["--watch"], ["--looks", 3]):
        status, _, err = run("inspect", "math", "--follow", *wrong)
        assert (status, "Traceback" in err) == (2, False)


@pytest.mark.parametrize("real_url", ONE, indirect=True)
def test_follow_ends_when_its_reader_has_ended(store, namespace):
    ExperienceStream(store, "math", namespace=namespace).close()
    environment = child_environment(without=PREFIX, REDRB_URL=store.url)
    command = followed(namespace)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as follow:
        follow.stdout.close()
        assert follow.wait(20) == 141


def _blocked(store: Client) -> bool:
    """Return whether a client waits for arrivals."""
    return b"cmd=xread " in store.execute("CLIENT", "LIST")


def test_a_redis_that_stops_ends_inspect_in_time(own_server, namespace, monkeypatch):
    server = own_server()
    with redrb.connect(server.url) as client:
        ExperienceStream(client, "math", namespace=namespace).close()
        browser = Browser(client, "math", namespace=namespace, timeout_s=0.3)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                browser.look(Choice())
            assert time.monotonic() - began < 15  # sockets wait for 20 s otherwise
        finally:
            os.kill(server.pid, signal.SIGCONT)
