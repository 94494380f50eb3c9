"""`redrb doctor`: its output, its exit status, its repairs, and a Redis that does not answer."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import redrb
from redrb import ExperienceStream
from redrb.cli.__main__ import main
from redrb.connection import Client
from tests.samples import numbered
from tests.servers import Server

Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(real_url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Run `redrb doctor --json`; returns its status and what it prints."""

    def run(*words: str, url: str = real_url) -> tuple[int, dict[str, Any]]:
        common = ["--url", url, "--namespace", namespace, "--over", "0.01", "--json"]
        capsys.readouterr()
        status = main(["doctor", *words, *common])
        return status, json.loads(capsys.readouterr().out)

    return run


def codes(report: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in report["findings"]}


def test_findings_repairs_and_status(
    owner: Client, real_url: str, namespace: str, doctor: Doctor
) -> None:
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(1)], [numbered(2)]])
        stream.take(1, timeout=0).reject("nan")
        owner.execute("XADD", stream._task.store.keys.stream, "9999999999999-*", "g", b"x")
        status, report = doctor("math", "--fail-on", "warning")
        assert status == 1
        assert {"dead-letters", "orphaned-entries"} <= codes(report)
        letters = next(one for one in report["findings"] if one["code"] == "dead-letters")
        command = f"redrb dead ls math --namespace {namespace} --url {real_url}"
        assert letters["command"] == command
        status, report = doctor("--repair")
        assert status == 0
        assert [one["code"] for one in report["repairs"]] == ["orphaned-entries"]
        assert "orphaned-entries" not in codes(report)
        assert report["repairs"][0]["done"]
        assert {one["server"] for one in report["servers"]}
        first, *_ = (
            entry for entry, _ in owner.execute("XRANGE", stream._task.store.keys.stream, "-", "+")
        )
        owner.execute("XDEL", stream._task.store.keys.stream, first)
        status, report = doctor()
        assert (status, report["worst"]) == (1, "critical")
        assert "different-storage" in codes(report)


def test_a_whole_task_on_a_well_kept_server_has_no_findings(
    own_server: Callable[..., Server], namespace: str, doctor: Doctor
) -> None:
    server = own_server("--appendonly", "yes", "--maxmemory", "1gb")
    with (
        redrb.connect(server.url) as client,
        ExperienceStream(client, "math", namespace=namespace, limit=64) as stream,
        redrb.WeightPublisher(client, "policy", namespace=namespace) as publisher,
    ):
        publisher.publish({"a": torch.ones(3)})
        stream.put_many([[numbered(number)] for number in range(9)])
        stream.take(4, timeout=5).ack()
        lease = stream.take(2, timeout=5)
        status, report = doctor("--fail-on", "info", url=server.url)
        assert codes(report) <= {
            "libc-allocator",
            "slow-link",
            "unknown-security-fixes",
        }  # they depend on the machine
        assert status == bool(report["findings"])
        lease.release()


def test_people_read_what_to_run(
    owner: Client, real_url: str, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        stream.put(numbered(1))
        stream.take(1, timeout=0).reject("nan")
        assert main(["doctor", "--url", real_url, "--namespace", namespace, "--over", "0.01"]) == 0
    printed = capsys.readouterr().out
    assert "WARNING dead-letters: task math\n  It holds 1 dead letter." in printed
    assert f"\n  Run: redrb dead ls math --namespace {namespace} --url {real_url}\n" in printed
    assert "\nfound: " in printed


def test_doctor_of_one_task_says_so_and_speaks_of_no_weights(
    owner: Client, real_url: str, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        stream.put(numbered(1))
        flags = ["--url", real_url, "--namespace", namespace, "--over", "0.2"]
        assert main(["doctor", "math", *flags]) == 0
        assert f"\nnamespace {namespace}: math only\n" in capsys.readouterr().out
        assert main(["doctor", *flags]) == 0
        assert f"\nnamespace {namespace}: tasks math; weights none\n" in capsys.readouterr().out


def test_a_damaged_task_is_a_finding(owner: Client, namespace: str, doctor: Doctor) -> None:
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        stream.put(numbered(1))
        owner.execute("SET", f"{stream._task.store.keys.prefix}parts", "x")
        for words in ([], ["math"]):
            status, report = doctor(*words)
            assert status == 1
            assert "failed-check" in codes(report)
            assert "WRONGTYPE" in report["findings"][0]["summary"]


@pytest.mark.parametrize("words", [["nope"], ["--over", "0"], ["--timeout", "nan"]])
def test_wrong_arguments(words: list[str], real_url: str, namespace: str) -> None:
    assert main(["doctor", *words, "--url", real_url, "--namespace", namespace]) == 2


def test_a_server_that_does_not_answer(own_server: Callable[..., Server], doctor: Doctor) -> None:
    server = own_server()
    assert doctor(url=server.url)[0] == 0
    os.kill(server.pid, signal.SIGSTOP)
    began = time.monotonic()
    status, report = doctor("--timeout", "0.3", url=server.url)
    assert time.monotonic() - began < 15  # sockets wait for 20 s otherwise
    assert (status, codes(report)) == (1, {"connection"})
    server.kill()
    status, report = doctor(url=server.url)
    assert (status, codes(report)) == (1, {"connection"})
    assert report["findings"][0]["command"] == f"redis-cli -h 127.0.0.1 -p {server.port} PING"
