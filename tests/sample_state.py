"""A state with two tasks, five workers and several troubles, for tests of what shows states."""

from __future__ import annotations

from dataclasses import replace

from redrb.experience import Status
from redrb.stream.task.ledger import AdmissionStats, Ledger, StreamStats
from redrb.watch.state.findings import findings_of
from redrb.watch.state.histogram import Histogram
from redrb.watch.state.history import History
from redrb.watch.state.model import (
    ConsumerGroupState,
    Rates,
    ServerState,
    Staleness,
    State,
    TaskState,
    WeightsState,
    WorkerState,
)
from redrb.watch.state.observer import View


def sample_state(now: float = 1_795_000_000.0) -> State:
    """Return a state in which one maker is dead, one is behind, and dead letters wait."""
    return State(
        namespace="default",
        where="redis://127.0.0.1:6379/0",
        time=now,
        took_s=0.002,
        servers=(
            ServerState(
                address="127.0.0.1:6379",
                version="7.0.15",
                uptime_s=86_400.0,
                used_memory=512_000_000,
                maxmemory=1_000_000_000,
                maxmemory_policy="noeviction",
                clients=9,
                blocked_clients=2,
                commands_per_s=1_820.0,
                cpu_share=0.12,
                aof=True,
                allocator="jemalloc-5.2.1",
                latency_s=0.0004,
            ),
        ),
        tasks=(_code(), _math()),
        tasks_total=2,
        weights=(
            WeightsState(
                name="actor",
                version=42,
                kind="delta",
                nbytes=3_100_000_000,
                stored_bytes=3_400_000_000,
                versions=3,
                age_s=12.0,
                pins=1,
            ),
        ),
    )


def view_of(state: State | None, **others: object) -> View:
    """Return a view of a state."""
    findings = findings_of(state) if state else ()
    return replace(View(state, 1, 0.4, "", findings), **others)


def history_of(state: State, looks: int = 30) -> History:
    """Return a history in which a state was seen in so many looks."""
    history = History()
    for _ in range(looks):
        history.add(state)
    return history


def _math() -> TaskState:
    stats = StreamStats(
        ledger=Ledger(
            put=12_345, acked=11_776, expired=3, filtered=21, dead=2, leased=32, waiting=511
        ),
        joined=1,
        stored=543,
        limit=4096,
        version=42,
        samples_put=98_760,
        bytes_put=2_880_000_000,
        samples_acked=94_208,
        returned=40,
        taken_over=32,
        dead_letters=2,
        consumers=1,
        consumers_waiting=0,
        producers_waiting=1,
        makers=3,
        waiting={Status.COMPLETED: 505, Status.ABORTED: 6},
        admission=AdmissionStats(
            granted=12_400, used=12_345, returned=7, lost=16, held=32, waiting=2, most=640, left=65
        ),
    )
    staleness = Staleness(
        waiting=Histogram.of({0: 260, 1: 190, 2: 50, 3: 5}, unknown=6),
        leased=Histogram.of({1: 20, 2: 12}),
        taken=Histogram.of({0: 2_000, 1: 7_000, 2: 2_500, 4: 308}),
    )
    workers = (
        _maker("gpu-01-4242", 42, 3.1, metrics={"reward": 0.71}),
        _maker("gpu-02-977", 42, 2.9, waits_for="room", waits_s=4.5),
        _maker("gpu-03-1312", 31, 0.4),
        _maker("gpu-04-2001", 40, 0.0, life="dead", seen_s=31.0),
        WorkerState(
            name="trainer-0",
            role="trainer",
            host="gpu-00",
            pid=812,
            redrb="0.1.0",
            seen_s=0.8,
            period_s=3.3,
            uptime_s=7_200.0,
            weight_version=42,
            groups=11_776,
            samples=94_208,
            leased=32,
            steps=368,
            steps_s=6_900.0,
            groups_per_s=6.2,
            samples_per_s=49.6,
            metrics={"reward": 0.74, "loss": 0.031, "kl": 0.012},
        ),
    )
    return TaskState(
        name="math",
        incarnation="a1b2c3",
        order="stalest",
        settings={"limit": "4096", "max_staleness": "4", "groups_per_version": "128"},
        groups=(ConsumerGroupState("default", stats, staleness),),
        workers=workers,
        workers_total=len(workers),
        stored_bytes=126_000_000,
        memory_bytes=131_000_000,
        rates=Rates(
            1.0, 6.4, 6.2, 51.2, 49.6, bytes_put=1_500_000.0, expired=0.0, filtered=0.1, dead=0.0
        ),
    )


def _code() -> TaskState:
    """A task from which nobody takes."""
    ledger = Ledger(put=800, waiting=800)
    stats = StreamStats(ledger=ledger, stored=800, samples_put=800, waiting={Status.COMPLETED: 800})
    return TaskState(
        name="code",
        incarnation="d4e5f6",
        order="fifo",
        groups=(ConsumerGroupState("default", stats, Staleness(Histogram(unknown=800))),),
        stored_bytes=8_000_000,
        rates=Rates(over_s=1.0, put=1.5, samples_put=1.5, bytes_put=15_000.0),
    )


def _maker(name: str, version: int, rate: float, **others: object) -> WorkerState:
    host, _, pid = name.rpartition("-")
    known = {"seen_s": 1.2, "period_s": 3.3, "uptime_s": 3_600.0} | others
    return WorkerState(
        name=name,
        role="maker",
        host=host,
        pid=int(pid),
        redrb="0.1.0",
        weight_version=version,
        behind=42 - version,
        groups=4_100,
        samples=32_800,
        rights=10,
        groups_per_s=rate,
        samples_per_s=rate * 8,
        **known,
    )
