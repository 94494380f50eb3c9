"""Troubles of tasks, weights and servers that are really made show in the findings of a look."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import redrb
from redrb import ExperienceStream
from redrb.algorithms.completions import Completions
from redrb.algorithms.reward import scores_of
from redrb.connection import Client
from redrb.keys import WeightKeys
from redrb.stream.task.settings import NO_BOUND
from redrb.watch.doctor.checkup import Checkup
from redrb.watch.state.findings import findings_of, tasks, workers
from redrb.watch.state.rates import SHORTEST_S, RateWindow
from redrb.watch.state.reader import StateReader
from redrb.weights.inspection.listing import remove_weights
from tests.samples import numbered
from tests.servers import Server

LEASE_MS = 300
"""Workers announce themselves three times in this time."""


@pytest.fixture
def reader(owner: Client, namespace: str) -> StateReader:
    return StateReader(owner, namespace)


def codes(reader: StateReader) -> list[str]:
    """Codes of the findings about tasks and weights: the server is shared with other tests."""
    found = findings_of(reader.look())
    return [finding.code for finding in found if not finding.subject.startswith("server ")]


def until(reader: StateReader, code: str, *, gone: bool = False) -> None:
    """Look until a finding shows, or shows no more."""
    end = time.monotonic() + 20
    while (code in (found := codes(reader))) == gone:
        assert time.monotonic() < end, found


def test_a_trainer_without_makers_and_with_slow_ones(
    owner: Client, namespace: str, reader: StateReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "LONG_WITHOUT_MAKER_S", 0.1)
    monkeypatch.setattr(tasks, "LONG_WITH_MAKERS_S", 0.2)
    with (
        ExperienceStream(owner, "math", namespace=namespace, lease_ms=LEASE_MS) as trainer,
        ExperienceStream(owner, "math", namespace=namespace, lease_ms=LEASE_MS) as maker,
        ThreadPoolExecutor(1) as threads,
    ):
        taking = threads.submit(trainer.take, 2, timeout=30)
        until(reader, "starved-trainer")
        maker.put(numbered(1))
        until(reader, "slow-makers")
        maker.put(numbered(2))
        taking.result().ack()
        until(reader, "slow-makers", gone=True)


@pytest.mark.parametrize("result", [float("nan"), None, "raises"])
def test_a_maker_whose_groups_are_all_filtered(
    owner: Client,
    namespace: str,
    reader: StateReader,
    result: float | str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verdict(completions: Any) -> Any:
        if result == "raises":
            raise LookupError("no verdict")
        return [result] * 2

    tokens, mask = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 2, dtype=torch.bool)
    completions = Completions(tokens, tokens, mask, torch.zeros(2, 2))
    options = {"namespace": namespace, "lease_ms": LEASE_MS, "on_bad_group": "drop"}
    with ExperienceStream(owner, "math", **options) as maker:
        maker.put(numbered(0))
        rewarded = 0
        while rewarded < workers.ALL_FILTERED:
            assert "filters-all" not in codes(reader)
            rewards = scores_of(verdict, completions, group_size=2)
            assert rewards.isnan().all()
            maker.put([replace(numbered(1), reward=each) for each in rewards])
            rewarded += 1
        until(reader, "filters-all")
        [found] = [each for each in findings_of(reader.look()) if each.code == "filters-all"]
        assert (
            "All of its last 16 groups were filtered; the newest fault: the reward" in found.summary
        )
        assert ("LookupError: no verdict (test_state_findings.py, line" in found.summary) == (
            result == "raises"
        )
        monkeypatch.setattr(workers, "LONG_STARVED_S", 0.1)
        monkeypatch.setattr(tasks, "LONG_WITH_MAKERS_S", 0.1)
        with (
            ExperienceStream(owner, "math", namespace=namespace, lease_ms=LEASE_MS) as trainer,
            ThreadPoolExecutor(1) as threads,
        ):
            taking = threads.submit(trainer.take, 2, timeout=30)
            until(reader, "slow-makers", gone=True)
            window, end = RateWindow(), time.monotonic() + 20
            severities: dict[str, str] = {}
            while severities.get("filters-all") != "critical":
                assert time.monotonic() < end
                maker.put([replace(numbered(1), reward=each) for each in rewards])
                state = window.rated(reader.look())
                if state.tasks[0].rates is not None:  # it counts filtered groups as put, too
                    severities = {each.code: each.severity for each in findings_of(state)}
            assert "slow-makers" not in severities
            maker.put(numbered(2))
            taking.result().ack()
        maker.put(numbered(2))
        until(reader, "filters-all", gone=True)


class Hangs(redrb.DetachedTrainer):
    """A trainer whose second step lasts until it may end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps = 0
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def training_step(self, experience: redrb.Experience) -> dict[str, float]:
        self.steps += 1
        if self.steps == 2:
            self.hangs.set()
            assert self.goes_on.wait(60)
        return {}

    def _update_remote_makers(self, fully_update: bool = False, **config: Any) -> None:
        pass


@pytest.mark.parametrize("limit", [0.0, 0.05])
def test_a_trainer_that_hangs_in_its_step(
    owner: Client,
    namespace: str,
    reader: StateReader,
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
) -> None:
    if not limit:
        monkeypatch.setattr(workers, "LEAST_HANG_S", 0.0)
    with (
        Hangs(
            [],
            1,
            client=owner,
            name="math",
            namespace=namespace,
            lease_ms=LEASE_MS,
            step_limit=limit,
        ) as trainer,
        ExperienceStream(owner, "math", namespace=namespace, lease_ms=LEASE_MS) as maker,
        ThreadPoolExecutor(1) as threads,
    ):
        training = threads.submit(trainer.fit, 4, 1)
        try:
            # one is trained, one hangs, and the prefetching thread waits for another one
            maker.put_many([[numbered(1)], [numbered(2)]])
            assert trainer.hangs.wait(30)
            until(reader, "hanging-trainer")
            (found,) = [
                each for each in findings_of(reader.look()) if each.code == "hanging-trainer"
            ]
            for said in (f"Process {os.getpid()} on {socket.gethostname()}", "1 leased group"):
                assert said in found.summary
            trainer.goes_on.set()
            until(reader, "hanging-trainer", gone=True)  # it waits for the third batch
            maker.put_many([[numbered(3)], [numbered(4)]])
            training.result(30)
        finally:
            trainer.goes_on.set()
            trainer.stop()


class Steps(Hangs):
    """A trainer whose steps do nothing."""

    def training_step(self, experience: redrb.Experience) -> dict[str, float]:
        return {}


def test_rewards_that_are_all_equal(owner: Client, namespace: str, reader: StateReader) -> None:
    options: dict[str, Any] = {"namespace": namespace, "lease_ms": LEASE_MS}
    with (
        Steps([], 2, client=owner, name="math", **options) as trainer,
        ExperienceStream(owner, "math", **options) as maker,
    ):
        maker.put_many([[numbered(each // 2)] for each in range(6)])  # equal in each batch
        maker.put_many([[numbered(0)] for _ in range(2 * (workers.EQUAL_STEPS - 3))])
        trainer.fit(workers.EQUAL_STEPS - 1, 1)
        trainer.buffer.stream.worker.beat()
        assert "equal-rewards" not in codes(reader)
        trainer.fit(1, 1)
        until(reader, "equal-rewards")
        (found,) = [one for one in findings_of(reader.look()) if one.code == "equal-rewards"]
        assert f"In each of its last {workers.EQUAL_STEPS} steps" in found.summary
        assert "it is 0 now" in found.summary
        maker.put_many([[numbered(0)], [numbered(1)]])
        trainer.fit(1, 1)
        until(reader, "equal-rewards", gone=True)


def test_weights_that_were_deleted_while_their_task_stayed(
    owner: Client, namespace: str, reader: StateReader
) -> None:
    options: dict[str, Any] = {"namespace": namespace, "weights": "policy", "lease_ms": LEASE_MS}
    values = {"a": torch.ones(3)}
    with ExperienceStream(owner, "math", **options) as stream:
        with redrb.WeightPublisher(owner, "policy", namespace=namespace) as publisher:
            for version in range(1, 4):
                publisher.publish(values)
                stream.put(numbered(version), policy_version=version)
        stream.worker.beat()
        assert "weights-behind-task" not in codes(reader)
        remove_weights(owner, "policy", namespace=namespace)
        with redrb.WeightPublisher(owner, "policy", namespace=namespace) as publisher:
            for _ in range(2):  # below the version of the task
                publisher.publish(values)
                stream.put(numbered(4), policy_version=1)
                until(reader, "weights-behind-task")
            publisher.publish(values)
            until(reader, "weights-behind-task", gone=True)


def test_makers_behind_and_makers_without_weights(
    owner: Client, namespace: str, reader: StateReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LONG_WITHOUT_WEIGHTS_S", 0.1)
    maker = redrb.ExperienceMakerHolder(
        ["math"],
        lambda: None,
        lambda: (nn.Linear(1, 1), None, None, None),
        sync_models_from_trainers=True,
        client=owner,
        namespace=namespace,
        max_new_tokens=1,
        stream_options={"lease_ms": LEASE_MS},
    )
    with maker, ThreadPoolExecutor(1) as threads:
        working = threads.submit(maker.workingloop, list)
        until(reader, "waits-for-weights")
        maker.stop()
        working.result()
    with ExperienceStream(owner, "math", namespace=namespace, lease_ms=LEASE_MS) as stream:
        stream.worker.weight_version = 1
        stream.put(numbered(1))
        stream.advance(workers.BEHIND + 2)
        until(reader, "maker-behind")


def test_groups_that_nobody_takes(owner: Client, namespace: str, reader: StateReader) -> None:
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        stream.put(numbered(1))
        assert codes(reader) == ["idle-task"]
        threading.Event().wait(SHORTEST_S)
        stream.put(numbered(2))
        assert codes(reader) == ["nobody-takes"]
        stream.join_group()
        stream.take(1, timeout=0).ack()
        assert codes(reader) == []


def test_a_full_task_without_and_with_a_trainer(
    owner: Client, namespace: str, reader: StateReader
) -> None:
    with (
        ExperienceStream(owner, "math", namespace=namespace, limit=2) as stream,
        ThreadPoolExecutor(1) as threads,
    ):
        stream.put_many([[numbered(1)], [numbered(2)]])
        putting = threads.submit(stream.put, numbered(3), timeout=20)
        while not stream.stats().producers_waiting:
            pass
        assert codes(reader) == ["blocked-makers"]
        with ExperienceStream(owner, "math", namespace=namespace) as trainer:
            lease = trainer.take(2, timeout=5)
            assert codes(reader) == ["full-task"]
            lease.ack()
            putting.result()
            assert codes(reader) == []


def test_dead_letters(owner: Client, namespace: str, reader: StateReader) -> None:
    with ExperienceStream(owner, "math", namespace=namespace, max_dead=2) as stream:
        stream.put_many([[numbered(number)] for number in range(2)])
        stream.take(1, timeout=0).reject("nan")
        assert codes(reader) == ["dead-letters"]
        stream.configure(max_dead=5)
        threading.Event().wait(SHORTEST_S)
        stream.take(1, timeout=0).reject("nan")
        assert codes(reader) == ["growing-dead-letters"]
        stream.configure(max_dead=2)
        assert codes(reader) == ["full-dead-letters"]


def test_a_bound_that_nobody_set_finds_nothing(
    owner: Client, namespace: str, reader: StateReader
) -> None:
    with ExperienceStream(owner, "math", namespace=namespace, max_staleness=NO_BOUND) as stream:
        stream.put_many([[numbered(1)], [numbered(2)]], policy_version=1)  # as a ReplayBuffer does
        with stream.take(1, timeout=0):
            assert codes(reader) == []


def test_staleness(owner: Client, namespace: str, reader: StateReader) -> None:
    with ExperienceStream(owner, "math", namespace=namespace, max_staleness=2) as stream:
        stream.put_many([[numbered(number)] for number in range(30)], policy_version=1)
        leased = stream.take(3, timeout=0)
        assert codes(reader) == ["unknown-staleness"]
        stream.advance(3)
        assert codes(reader) == ["staleness-at-bound"]
        stream.advance(4)
        assert codes(reader) == ["staleness-above-bound"]
        leased.ack()
        stream.expire()
        assert codes(reader) == ["expiring-groups"]


def test_a_ledger_that_does_not_balance(owner: Client, namespace: str, reader: StateReader) -> None:
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        stream.put(numbered(1))
        stream.take(1, timeout=0).ack()
        owner.execute("HINCRBY", f"{stream._task.store.keys.prefix}group:default", "acked", 1)
        (finding,) = findings_of(reader.look())[:1]
        assert finding.code == "unbalanced-ledger"
        assert "not accounted for: -1." in finding.summary


def test_consumer_groups_of_other_programs_hide_no_figures(
    owner: Client, namespace: str, reader: StateReader
) -> None:
    with ExperienceStream(owner, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(1)], [numbered(2)]])
        lease = stream.take(1, timeout=0)
        groups = stream._task.store.keys.groups
        owner.at(groups).execute("SADD", groups, b"\xff", "a b")
        checked = Checkup(owner, namespace, reader.look)
        [task] = checked.state.tasks
        assert [(each.name, each.stats.ledger.leased) for each in task.groups] == [("default", 1)]
        [examined] = checked.examined
        assert [each.name for each in examined.consumer_groups] == ["default"]
        found = {each.code: each for each in findings_of(checked.state)}
        assert "2 consumer groups of a name that none can have" in found["failed-check"].summary
        lease.release()


def test_weights(owner: Client, namespace: str, reader: StateReader) -> None:
    with redrb.WeightPublisher(owner, "policy", namespace=namespace) as publisher:
        publisher.publish({"a": torch.ones(3)})
        assert codes(reader) == []
        pins = WeightKeys.of(namespace, "policy").prefix + "pins"
        owner.execute("HSET", pins, "reader", "1 1 1000 60000")
        assert codes(reader) == ["expired-pins"]


def test_servers(own_server: Callable[..., Server], namespace: str) -> None:
    server = own_server("--maxmemory-policy", "allkeys-lru", "--loglevel", "warning")
    with redrb.connect(server.url, allow_eviction=True) as client:
        reader = StateReader(client, namespace)

        def found() -> set[str]:
            return {finding.code for finding in findings_of(reader.look())}

        assert found() == {"would-evict-keys"}
        used = int(client.execute("INFO", "memory").partition(b"used_memory:")[2].split()[0])
        client.execute("CONFIG", "SET", "maxmemory", str(used * 100 // 87))
        assert found() == {"evicts-keys", "memory-near-limit"}
        client.execute("CONFIG", "SET", "maxmemory-policy", "noeviction")
        client.execute("CONFIG", "SET", "maxmemory", str(used))
        assert found() == {"memory-full"}
        client.execute("CONFIG", "SET", "maxmemory", "0")
        (server.directory / "dump.rdb").mkdir()  # the snapshot cannot be renamed to this
        client.execute("BGSAVE")
        until = time.monotonic() + 10
        while found() != {"failed-save"}:
            assert time.monotonic() < until, found()
