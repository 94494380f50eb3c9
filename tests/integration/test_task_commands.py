"""`redrb ls`, `redrb rm` and `redrb dead` on a real server."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from argparse import Namespace
from typing import Any

import pytest
import torch

import redrb
from redrb import ExperienceStream, ShardedStream, registry
from redrb.cli import stats
from tests.samples import numbered


def test_ls_lists_tasks_and_weights(store, namespace, run):
    status, out, err = run("ls")
    assert (status, out) == (0, "")
    assert "there are no tasks, tables and weights" in err
    with ExperienceStream(store, "math", namespace=namespace, order="lifo") as stream:
        stream.put_many([[numbered(1)], [numbered(2)]])
        lease = stream.take(1, timeout=0)
        redrb.WeightPublisher(store, "actor", namespace=namespace).publish({"a": torch.ones(2)})
        _, out, _ = run("ls", "--json")
        found = json.loads(out)
        assert found["tasks"][0]["stats"]["ledger"]["waiting"] == 1
        assert found["weights"][0]["name"] == "actor"
        head, task, _, _, weights = run("ls")[1].splitlines()
        assert head.split()[:3] == ["task", "order", "waiting"]
        assert task.split()[:6] == ["math", "lifo", "1", "1", "0", "2"]
        assert weights.split()[:3] == ["actor", "1", "full"]
        lease.release()


@pytest.mark.parametrize(
    "words", ["ls", "weights ls", "weights show x", "doctor --over 0.2", "top --once"]
)
def test_a_command_that_finds_nothing_names_other_namespaces(
    words, store, namespace, run, monkeypatch
):
    monkeypatch.setattr(registry, "REGISTRIES", f"redrb:{{{namespace}*}}:registry")
    others = [f"{namespace}-{number:03}" for number in range(120)]
    for made in (0, 1, 10, 11, 120) if words == "ls" else (11,):
        for each in others[:made]:
            registry.Registry(store, each).add("task", "math")
        named = f": {', '.join(others[: min(made, 10)])}" if made else ""
        more = f" and {made - 10} more" if made > 10 else ""
        said = " ".join(" ".join(run(*words.split())[1:]).split())
        assert f"--namespace names another one{named}{more}" in said


def test_stats_shows_workers_rates_staleness_and_admission(store, namespace, run):
    settings = {"namespace": namespace, "max_staleness": 4, "groups_per_version": 50}
    with (
        ExperienceStream(store, "math", **settings) as stream,
        ExperienceStream(store, "code", namespace=namespace) as code,
    ):
        stream.worker.label, stream.worker.metrics = "maker-1", {"reward": 0.5}
        stream.advance(3)
        stream.put_many([[numbered(n, policy_version=1)] for n in range(3)])
        lease = stream.take(1, timeout=0)
        stream.worker.beat()
        code.put(numbered(1))
        status, out, err = run("stats", "math", "code")
        math, other = out.split("\n\ntask ")
        assert (status, "'default' has taken nothing yet" in err) == (0, True)  # task code
        figures = dict(line.rsplit(maxsplit=1) for line in math.splitlines() if line)
        wanted = {"put": "3", "waiting completed": "2", "leased": "1", "put/s": None}
        wanted |= {"rights most": "250", "rights held": "0", "admission_balanced": "True"}
        assert {name: figures.get(name) for name in wanted} == wanted
        assert other.split()[:3] == ["code", "order", "fifo"]
        rows = {line.split()[0]: line.split() for line in math.splitlines() if line}
        assert rows["waiting"][:4] == ["waiting", "2.00", "2", "0"]  # staleness
        assert rows["maker-1"][:3] == ["maker-1", "trainer", "live"]
        assert str(os.getpid()) in rows["maker-1"]
        lines = run("stats", "math", "code", "--json")[1].splitlines()
        found = [json.loads(line) for line in lines]
        shown = json.loads(run("top", "--json")[1])["state"]["tasks"]
        assert [task["name"] for task in found] == ["math", "code"]
        assert found[0].keys() == shown[1].keys()
        assert found[0]["groups"] == shown[1]["groups"]
        assert found[0]["rates"] is None  # they need several looks
        lease.release()


def test_stats_of_a_group_that_has_not_joined_shows_what_it_would_get(store, namespace, run):
    with ExperienceStream(store, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(n)] for n in range(3)])
        stream.take(1, timeout=0).ack()
        words = ("stats", "math", "--group", "critic")
        _, out, err = run(*words)
        assert "consumer group 'critic' has taken nothing yet" in err
        figures = dict(line.rsplit(maxsplit=1) for line in out.splitlines() if line)
        assert (figures["put"], figures["joined"]) == ("2", "0")
        found = json.loads(run(*words, "--json")[1])
        assert ([group["name"] for group in found["groups"]], found["rates"]) == (
            *(["critic", "default"], None),
        )


def test_stats_that_look_again_show_rates(real_url, store, namespace, capsys):
    options = Namespace(
        url=real_url, namespace=namespace, task=["math"], group="default", json=True, watch=0.25
    )
    with ExperienceStream(store, "math", namespace=namespace) as stream:
        stream.put(numbered(1))
        began = time.monotonic()
        stats._run(options)
        stream.put_many([[numbered(n)] for n in range(9)])
        while time.monotonic() - began < 0.25:  # two looks in quick succession have no rates
            stream.stats()
        stats._run(options)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["rates"] is None
    assert second["rates"]["put"] > 0


def test_rm_names_the_consumers_and_makers_that_are_alive(store, namespace, run):
    """Also makers without a right to begin groups, and without a put that waits."""
    with (
        ExperienceStream(store, "math", namespace=namespace) as maker,
        ExperienceStream(store, "math", namespace=namespace) as trainer,
    ):
        maker.worker.label, trainer.worker.label = "maker-1", "actor"
        maker.put_many([[numbered(n)] for n in range(2)])
        maker.worker.begins()
        trainer.take(1, timeout=0).ack()
        trainer.worker.beat()
        status, out, err = run("rm", "math", "--yes")
        where = f"(process {os.getpid()} on {socket.gethostname()})"
        assert status == 1
        assert "is in use by " in err
        for named in (f"maker maker-1 {where}", f"trainer actor {where}"):
            assert f"alive: {named}" in out
            assert named in err
        trainer.close()
        assert run("rm", "math", "--yes")[0] == 1
        assert len(maker) == 1
        status, out, _ = run("rm", "math", "--yes", "--force", "--json")
        assert [worker["label"] for worker in json.loads(out)["workers"]] == ["maker-1"]
        assert not store.execute("EXISTS", maker._task.store.keys.task)


def test_ls_shows_the_limits_of_tasks(store, namespace, run):
    tasks: dict[str, dict[str, Any]] = {
        "a": {"limit": 4096, "max_bytes": 10**9},
        "b": {"limit": 512},
        "c": {"limit": 8},
        "d": {},
    }
    for name, settings in tasks.items():
        ExperienceStream(store, name, namespace=namespace, **settings).close()
    head, *rows = run("ls")[1].splitlines()
    begin, end = head.index("stored") + len("stored"), head.index("limit") + len("limit")
    shown = [row[begin:end].strip() for row in rows]
    assert shown == ["4,096, 1.0 GB", "512", "8", "-"]


def test_ls_shows_the_sum_of_shards(store, namespace, run):
    with ShardedStream(store, "math", shards=3, namespace=namespace, limit=8) as stream:
        ExperienceStream(store, "mathematics", namespace=namespace).close()
        for number in range(7):
            stream.put(numbered(number))
        stream.take(2, timeout=5).ack()
        lines = [line.split() for line in run("ls")[1].splitlines()]
    assert [line[0] for line in lines[1:]] == [*stream.shards, "math@*", "mathematics"]
    assert lines[4][1:7] == ["fifo", "5", "0", "0", "5", "24"]


def test_the_sum_of_shards_is_looked_at_as_a_task(store, namespace, run):
    with ShardedStream(store, "math", shards=3, namespace=namespace, limit=8) as stream:
        stream.put_many([[numbered(number)] for number in range(20)])
        names = list(stream.shards)
        _, out, _ = run("stats", "math@*", "--json")
        found = json.loads(out)
        assert found["name"] == "math@*"
        [group] = found["groups"]
        assert (group["stats"]["limit"], group["stats"]["ledger"]["put"]) == (24, 20)
        _, out, _ = run("stats", "math@*")
        assert [line.split() for line in out.splitlines() if line.startswith("task ")] == [
            ["task", "math@*"]
        ]
        assert "math@*" not in run("stats", *names)[1]
        _, out, _ = run("top", "math@*", "--once")
        assert "WORKERS of math@* (" in out
        assert "WORKERS of math@0" not in out
        status, _, err = run("stats", "code@*")
    assert status == 2
    assert "there is no task 'code@*'" in err


def test_rm_shows_what_it_deletes_and_asks(store, namespace, run, monkeypatch):
    with ExperienceStream(store, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(n)] for n in range(3)])
        stream.take(1, timeout=0).reject("bad")
        stream.take(1, timeout=0)
        status, _, err = run("rm", "math", "--yes")
        assert (status, "is in use" in err) == (1, True)
    status, out, err = run("rm", "math")
    assert (status, "--yes" in err) == (2, True)  # no terminal
    assert "consumer group default: 2 waiting, 0 leased, 0 consumers alive" in out
    assert "dead letters       1" in out
    for answer, status in (("n\n", 1), ("y\n", 0)):
        terminal = io.StringIO(answer)
        terminal.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", terminal)
        assert run("rm", "math")[0] == status
    status, _, err = run("stats", "math")
    assert (status, "there is no task 'math'" in err) == (2, True)
    assert run("save", "math", "/nowhere/math")[0] == 2


def test_dead_letters_are_listed_requeued_and_dropped(store, namespace, run):
    with ExperienceStream(store, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(n)] for n in range(1, 6)])
        stream.take(2, timeout=0).reject("nan loss")
        stream.take(1, timeout=0).reject(ValueError("too long"))
        lines = run("dead", "ls", "math")[1].splitlines()
        assert [line.split()[0] for line in lines] == ["id", "3", "2", "1"]
        assert lines[2].endswith("nan loss")
        assert len(json.loads(run("dead", "ls", "math", "--json", "--reason", "nan")[1])) == 2
        shown = run("inspect", "math", "3")[1]
        assert "reward       3 (mean)" in shown
        assert "ValueError: too long" in shown
        assert f"-{os.getpid()}-" in shown
        assert run("dead", "requeue", "math")[0] == 2
        status, out, _ = run("dead", "requeue", "math", "3")
        assert (status, out.split()) == (0, ["requeued", "1", "id", "new", "id", "3", "6"])
        assert "it was requeued; its first id was 3" in run("inspect", "math", "6")[1]
        status, _, err = run("dead", "requeue", "math", "3", "1")
        assert (
            status,
            f"no dead letter 3: `redrb dead ls math --namespace {namespace}`" in err,
        ) == (1, True)
        assert stream.stats().ledger.waiting == 4
        assert run("dead", "drop", "math", "--all")[0] == 2  # no terminal
        assert (
            run("dead", "drop", "math", "--reason", "nan", "--yes")[1] == "dropped            1\n"
        )
        status, out, err = run("dead", "requeue", "math", "--all")
        assert (status, out) == (0, "requeued           0\n")
        assert "task 'math' has no dead letters of consumer group 'default'" in err
        assert run("dead", "drop", "math", "--all")[0] == 0  # nothing to ask about
        assert run("dead", "ls", "math", "--reason", "nan") == (
            *(0, "", "redrb: task 'math' has no dead letters with 'nan' in why.\n"),
        )
        ledger = stream.stats().ledger
        assert (ledger.dead, ledger.waiting, ledger.balanced) == (1, 4, True)
    assert run("dead", "ls", "maths")[0] == 2


def test_dead_letters_of_incomplete_groups_are_dropped(store, namespace, run):
    with ExperienceStream(store, "math", namespace=namespace) as stream:

        def bury(*keys):
            due = f"{stream._task.store.keys.prefix}part_due"
            for key in keys:
                stream.put_part(key, numbered(0), index=0, of=2, on_incomplete="dead")
                store.execute("ZADD", due, "XX", 1, key)
            stream._parts.finish_due()

        stream.put_many([[numbered(n)] for n in range(2)])
        stream.take(2, timeout=0).reject("has no parts")
        bury("a", "b")
        status, _, err = run("dead", "requeue", "math", "0")
        assert (status, "were never put" in err) == (2, True)
        json_out = run("dead", "requeue", "math", "2", "--json")[1]
        assert json.loads(json_out) == {"requeued": 1, "ids": {"2": 3}}
        assert run("dead", "drop", "math", "--reason", "parts", "--yes")[1].split() == [
            *("dropped", "1"),  # of the consumer group
        ]
        assert run("dead", "drop", "math", "--all", "--yes")[1] == "dropped            2\n"
        bury("c", "d")
        status, out, err = run("dead", "drop", "math", "0", "7")
        assert (status, out, "no dead letter 7" in err) == (1, "dropped            2\n", True)
        assert run("dead", "ls", "math", "--json")[1].strip() == "[]"
