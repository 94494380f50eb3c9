"""Runs the demo: starts server and workers, shows the screen, prints the report."""

from __future__ import annotations

import json
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from rich.console import Console

from redrb.connection import Client, connect
from redrb.connection.deadline import ending_within
from redrb.connection.stop_time import StopTime
from redrb.demo.history import History
from redrb.demo.processes import GRACE_S, STOP_TIMEOUT_S, Worker
from redrb.demo.report import draw_curve, summary, table
from redrb.demo.screen import Screen
from redrb.demo.settings import DemoSettings
from redrb.errors import ConfigError, StoreError
from redrb.keys import registry_key
from redrb.stream import ExperienceStream, StreamStats

TASK = "sort"
REFRESH_S = 0.25
HARD_END_S = 20.0
"""Seconds after the trainer's time limit at which the demo ends a trainer that still runs."""


def run_demo(settings: DemoSettings, *, as_json: bool) -> int:
    """Run the demo; returns 0 if all workers ended with status 0 and the ledger balances."""
    if find_spec("matplotlib") is None:
        raise ConfigError("the demo draws a curve: pip install 'redrb[demo]'.")
    console = Console()
    out = Path(settings.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made: {error.strerror}.") from error
    history, started = History(), time.perf_counter()
    url = settings.url or "embedded://"
    to_end = StopTime(STOP_TIMEOUT_S)
    with connect(url, min_replicas=settings.min_replicas) as client, ending_within(to_end):
        namespace = f"demo-{int(time.time())}-{uuid.uuid4().hex[:8]}"
        console.print(f"server {'.'.join(map(str, client.server_version))} at {client.where}")
        stream = ExperienceStream(client, TASK, namespace=namespace)
        with _interrupts(to_end) as interrupted:
            workers = _start_workers(settings, client, namespace, out, history)
            try:
                _watch(workers, stream, history, console, settings, started, interrupted)
            finally:
                failures = _end_workers(workers)
            seconds = time.perf_counter() - started
            stats = stream.stats()
            _delete_run(stream, client, namespace)
    for name, status, errors in failures:
        console.print(f"[red]{name} ended with status {status}[/red]\n{errors}", highlight=False)
    if history.reward_last is None:
        console.print(
            f"[red]no reward was measured[/red]; errors of the workers are in {out}/*.err"
        )
        return 1
    figures = summary(seconds, history, stats)
    console.print(table(figures, history, stats))
    draw_curve(out / "curve.png", history, workers=settings.workers)
    console.print(f"curve: {out / 'curve.png'}")
    if as_json:
        print(json.dumps(figures), flush=True)
    return 0 if not failures and stats.ledger.balanced else 1


def _start_workers(
    settings: DemoSettings, client: Client, namespace: str, out: Path, history: History
) -> list[Worker]:
    """Start the trainer, then the makers, with the commands that a cluster would use."""
    shared = ["--namespace", namespace, "--task", TASK, "--seed", str(settings.seed)]
    shared += ["--min-replicas", str(settings.min_replicas)]
    shared += ["--max-staleness", str(settings.max_staleness)]
    ends = ["--target-reward", str(settings.target_reward)]
    ends += ["--max-seconds", str(settings.max_seconds)]
    commands = {"trainer": ["redrb.workers.trainer", "sorting", *shared, *ends]}
    for number in range(1, settings.makers + 1):
        name = f"maker-{number}"
        commands[name] = ["redrb.workers.maker", "sorting", *shared, "--worker", name]
    return [
        Worker(name, command, client.url, out, history.add) for name, command in commands.items()
    ]


def _watch(
    workers: list[Worker],
    stream: ExperienceStream,
    history: History,
    console: Console,
    settings: DemoSettings,
    started: float,
    interrupted: threading.Event,
) -> None:
    """Show the run until the trainer has ended, a signal came, or time is up."""
    trainer, *makers = workers
    with Screen(console, settings) as screen:
        while trainer.running and any(maker.running for maker in makers):
            seconds = time.perf_counter() - started
            screen.show(seconds, history, _look(stream))
            if interrupted.wait(REFRESH_S):
                return
            if seconds > settings.max_seconds + HARD_END_S:
                console.print("[red]the trainer did not end in time[/red]")
                return
        screen.show(time.perf_counter() - started, history, _look(stream))


def _look(stream: ExperienceStream) -> StreamStats | None:
    try:
        return stream.stats()
    except StoreError:
        return None  # the screen leaves them out; the workers report the error


def _end_workers(workers: list[Worker]) -> list[tuple[str, int, str]]:
    """End all workers; returns name, exit status and error output of each that failed."""
    for worker in workers:
        worker.terminate()
    until = time.monotonic() + GRACE_S
    ended = [(worker.name, *worker.end(max(0.5, until - time.monotonic()))) for worker in workers]
    return [(name, status, errors) for name, status, errors in ended if status != 0]


def _delete_run(stream: ExperienceStream, client: Client, namespace: str) -> None:
    """Delete all keys of the run: the Redis may be the user's."""
    stream.close()
    pattern = f"redrb:{{{namespace}:*"
    for server in client.primaries():
        cursor = b""
        while cursor != b"0":
            cursor, keys = server.execute("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", 1000)
            for key in keys:
                client.at(key).execute("UNLINK", key)
    registry = registry_key(namespace)
    client.at(registry).execute("UNLINK", registry)


@contextmanager
def _interrupts(to_end: StopTime) -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into an event: the demo then ends its workers, deletes its keys.

    From then on the time `to_end` counts. A second signal has its ordinary effect.
    """
    event = threading.Event()

    def handle(number: int, _frame: FrameType | None) -> None:
        event.set()
        to_end.begin()
        signal.signal(number, before[number])

    numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
