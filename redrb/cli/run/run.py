"""Runs a whole job: starts server and workers, shows their progress, and ends them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from redrb.cli.processes.metrics_log import MetricsLog, RecordFile
from redrb.cli.run.folder import Owner, RunFolder
from redrb.cli.run.held import return_held
from redrb.cli.run.history import JobEvents
from redrb.cli.run.job import TRAINER, Job, delete_job, delete_namespace
from redrb.cli.run.report import progress_line, summary, table
from redrb.cli.run.server import server_for, watch_advice
from redrb.cli.run.supervisor import OnChange, ProcessState, Supervisor, Worker
from redrb.cli.run.worker_process import Death, WorkerProcess
from redrb.connection import Client, connect
from redrb.connection.deadline import Deadline
from redrb.connection.stop import Stop
from redrb.errors import ConfigError, StoreError, UnknownTask
from redrb.recipe.loading import file_of
from redrb.stream import StreamStats
from redrb.stream.task.lookup import task_stats
from redrb.watch.state.observer import Observer, View

if TYPE_CHECKING:
    from redrb.cli.run.ray_job import RayJob

LINE_EVERY_S = 5.0
"""Seconds between two lines that say how far the run is."""

LOOK_S = 1.0
"""Seconds between two looks at the run, if nothing happens."""

SHOWN_MESSAGES = 3
"""Newest messages that the screen shows; all are printed after it."""

END_S = 60.0
"""Seconds after SIGTERM that the trainer has for its step under way, beside those on Redis."""

MAKER_END_S = 10.0
"""The same for makers: what they have not put is made again, and a reward function may hang."""


@dataclass
class Run:
    """One run of a job.

    Attributes:
        temporary: Nothing of the run is kept but its records: its keys are deleted at its end, its
            own server keeps no data, and records of earlier runs are deleted.
        show: Shows it on a terminal until `follow`, which it calls in a thread, returns, and then
            calls `screen_ended`; SIGINT ends the run. It is given the run, an observer of the job's
            namespace, and this namespace for people. None: a line is printed every few seconds.
        ray: The cluster that the workers run on, and go on without this process; None: they are
            processes of this machine.
    """

    job: Job
    folder: RunFolder
    temporary: bool = False
    fresh: bool = False
    as_json: bool = False
    show: Callable[[Run, Observer, str], None] | None = None
    ray: RayJob | None = None
    _console: Console = field(default_factory=Console)
    _history: JobEvents = field(default_factory=JobEvents)
    _diary: MetricsLog = field(init=False)
    _supervisor: Supervisor = field(init=False)
    _interrupt: Interrupt = field(default_factory=lambda: Interrupt())
    _observer: Observer = field(init=False)
    _started: float = 0.0
    _failed: bool = False
    _lost: bool = False
    _why: str = ""
    _kept: list[Text] | None = None

    def run(self) -> int:
        """Run the job until its trainer ends or a signal comes; returns the exit status.

        Returns:
            0: the trainer has reached its end, and all is in order. 1: a process was given up, or
            the ledger does not balance. After a signal 128 and its number, such as 130.

        Raises:
            ConfigError: The run cannot begin with these settings.
            StoreError: Redis cannot be reached, or did not start.
        """
        recipe = self.job.recipe
        to_end = Stop(recipe.stop_timeout)
        supervisor = self._supervisor = Supervisor(TRAINER, self._report)
        if self.ray is not None:
            self.ray.complain, self.ray.leave = self._complain, supervisor.leave

        def wake() -> None:
            if self.ray is not None and self._interrupt.number == signal.SIGHUP:
                supervisor.leave("the terminal is gone")
            to_end.begin()
            supervisor.happenings.put(None)

        data = None if self.temporary else self.folder.redis
        server = server_for(recipe.url, data, min_replicas=recipe.min_replicas)
        owner = Owner(type(recipe).__name__, file_of(type(recipe)), demo=self.temporary)
        with ExitStack() as scope:
            scope.enter_context(self.folder.used())
            moved = "" if self.fresh else self.folder.check_owner(owner)
            if moved:
                self._complain(moved)
            if self.ray is not None:
                scope.callback(self.ray.close)
                if self.fresh and self.ray.running:
                    raise ConfigError("--fresh: the job runs on this cluster; end it first.")
            self._interrupt = scope.enter_context(interrupts(wake, supervisor.kill))
            scope.enter_context(Deadline(budget=to_end))
            if self.fresh:
                self.folder.clear_state()
            server.lock = self.folder.workers_lock
            scope.callback(server.close)
            supervisor.add_server(server, self.job.restarts)
            client = scope.enter_context(connect(server.url))
            seconds = self._in_folder(client, server.url, owner)
            stats = self._stats(client)
            if self.temporary:
                delete_namespace(client, recipe.namespace)
        return self._conclude(seconds, stats)

    def _in_folder(self, client: Client, url: str, owner: Owner) -> float:
        if self.fresh:
            delete_job(client, self.job.recipe)
        if self.fresh or self.temporary:
            self.folder.clear_records()
        for event in self.folder.events():
            self._history.add(event)
        self._history.begin_run()
        self._introduce(client)
        supervisor, self._started = self._supervisor, time.perf_counter()
        with MetricsLog(str(self.folder.diary), worker="run", say=self._lost_records) as diary:
            self._diary = diary
            self._diary.write("began", makers=self.job.makers, where=client.where, **asdict(owner))
            try:
                self._add_workers(client, url)
                self._say(watch_advice(url, self.job.recipe.namespace))
                self._watch(client)
                self._why = self._reason()
                if not supervisor.left:
                    supervisor.end_workers(self._stop_s(TRAINER), makers_s=self._stop_s("makers"))
            finally:
                if self.ray is None:
                    supervisor.kill()
            seconds = time.perf_counter() - self._started
            self._failed = ProcessState.GIVEN_UP in supervisor.states.values()
            self._diary.write("finished", seconds=seconds, why=self._why)
        return seconds

    def _introduce(self, client: Client) -> None:
        recipe, steps = self.job.recipe, self._history.steps
        version = ".".join(map(str, client.server_version))
        self._say(f"server {version} at {client.where}")
        if not self.temporary:
            self._say(f"task {recipe.task_name} of namespace {recipe.namespace}")
            kept = "metrics, logs and checkpoints" if self.ray is None else "metrics and logs"
            self._say(f"{kept} in {self.folder.path}")
        if self.ray is not None and self.ray.running:
            self._say(f"follows the workers that run: {', '.join(self.ray.running)}")
        if steps:
            self._say(f"goes on after {steps:,} steps of earlier runs; --fresh begins anew")

    def _add_workers(self, client: Client, url: str) -> None:
        job, folder, history = self.job, self.folder, self._history
        task, namespace = job.recipe.task_name, job.recipe.namespace
        environment, trained_before_s = job.environment(url), history.trained_s

        def add(name: str) -> None:
            def start(on_change: OnChange) -> Worker:
                def ended(death: Death) -> None:
                    on_change(death)
                    if death.status:
                        return_held(client, task, namespace, death.pid)

                metrics = RecordFile(folder.metrics(name), self._lost_records)
                log = RecordFile(folder.log(name), self._lost_records)
                if self.ray is not None:
                    return self.ray.start(
                        name,
                        stop_s=self._stop_s(name),
                        metrics=metrics,
                        log=log,
                        on_event=history.add,
                        on_change=on_change,
                    )
                return WorkerProcess(
                    job.command(name, trained_s=history.trained_s - trained_before_s),
                    environment=environment,
                    metrics=metrics,
                    log=log,
                    on_event=history.add,
                    on_end=ended,
                    lock=folder.workers_lock,
                )

            self._supervisor.add_worker(name, start, job.restarts if self.ray is None else 0)

        for name in self.ray.names if self.ray is not None else (TRAINER, *job.maker_names):
            add(name)

    def _stop_s(self, worker: str) -> float:
        """Return the seconds that a worker has after SIGTERM."""
        return self.job.recipe.stop_timeout + (END_S if worker == TRAINER else MAKER_END_S)

    def _watch(self, client: Client) -> None:
        namespace = self.job.recipe.namespace
        with Observer(client, namespace) as self._observer:
            if self.show is None:
                self.follow()
            else:
                self._kept = []
                self.show(self, self._observer, f"namespace {namespace} at {client.where}")

    def said(self) -> list[str]:
        """Return the newest lines of the run, for the screen."""
        kept = (self._kept or [])[-SHOWN_MESSAGES:]
        newest = [each.plain.partition("\n")[0] for each in kept]
        return [f"{self.job.title}  ·  {self.job.workers}", self._line(), *newest]

    def screen_ended(self) -> None:
        """Print what was said while the screen was shown, and what is said from now on."""
        kept, self._kept = self._kept, None
        for message in kept or ():
            self._print(message)

    def follow(self) -> None:
        """Keep the workers running, and print lines unless a screen shows them."""
        most_s, printed_s = self.job.most_seconds, -LINE_EVERY_S
        while not (self._supervisor.over or self._interrupt.number):
            seconds = time.perf_counter() - self._started
            silent_s = self._history.silent_s
            if most_s is not None and seconds > most_s and silent_s > self.job.most_silent_s:
                self._complain(f"the trainer did not end in time: no step for {silent_s:.0f} s")
                return
            self._supervisor.step(LOOK_S)
            for fault in self._history.new_faults():
                self._complain(f"groups are filtered: {fault}")
            if self._kept is None and seconds - printed_s >= LINE_EVERY_S:
                printed_s = seconds
                self._print(Text(self._line()))

    def _line(self) -> str:
        view = self._observer.newest()
        found = view.state.task(self.job.recipe.task_name) if view.state else None
        stats = found.main.stats if found and found.main else None
        made = progress_line(time.perf_counter() - self._started, self._history, stats)
        return "; ".join((made, *islice(_away(view, self.job.recipe.task_name), 1)))

    def _report(self, event: str, **values: Any) -> None:
        """Write a death or a restart to the diary, and say it."""
        self._diary.write(event, **values)
        name, why, reason = values["worker"], values.get("why"), values.get("reason", "")
        if event == "restarted":
            self._say(f"{name} was started again")
        elif event == "death":
            delay_s = values["restart_in_s"]
            when = "Ray starts it again" if delay_s is None else f"restart in {delay_s:g} s"
            self._complain(f"{name} {why}; {when}{values['brief']}")
        else:
            times = f", {values['deaths']} times in a row," if values["deaths"] > 1 else ""
            self._complain(f"{name} {why}{times} and was given up")
            self._say(reason or "It printed no error.")
            self._say(f"To start {name} again, repeat the command of this run when it has ended.")

    def _lost_records(self, text: str) -> None:
        """Say once that lines of logs or metrics are dropped; several files share a disk."""
        if not self._lost:
            self._lost = True
            self._complain(text)

    def _reason(self) -> str:
        if self._supervisor.left:
            return f"{self._supervisor.left}; the same command follows the job again"
        if self._interrupt.number:
            return f"{self._interrupt.name} has ended the run"
        if self._supervisor.states[TRAINER] is ProcessState.DONE and self._history.ended:
            return f"the trainer has ended: {self._history.ended}"
        return self._supervisor.over or "its time is up"

    def _stats(self, client: Client) -> StreamStats | None:
        recipe = self.job.recipe
        try:
            return task_stats(client, recipe.task_name, namespace=recipe.namespace, group="default")
        except (StoreError, UnknownTask) as error:
            self._complain(f"the ledger cannot be read: {error}")
            return None

    def _conclude(self, seconds: float, stats: StreamStats | None) -> int:
        history, figures = self._history, summary(seconds, self._history, stats)
        self._say(self._why)
        self._console.print(table(figures, history, stats))
        if history.reward_last is None:
            self._say(f"no reward was measured; what the workers wrote is in {self.folder.path}")
        if self._interrupt.number and not (self.temporary or self._supervisor.left):
            self._say("the next run goes on from here")
        if self.as_json:
            print(json.dumps(figures), flush=True)
        if self._interrupt.number:
            return self._interrupt.status
        failed = self._failed or bool(self._supervisor.left)
        return 0 if not failed and stats is not None and stats.ledger.balanced else 1

    def _say(self, text: str, style: str = "") -> None:
        message = Text(text, style=style)
        if self._kept is None:
            self._print(message)
        else:
            self._kept.append(message)

    def _complain(self, text: str) -> None:
        self._say(text, "red")

    def _print(self, message: Text) -> None:
        self._console.print(message, soft_wrap=True, highlight=False)


def _away(view: View, task: str) -> Iterator[str]:
    """Yield which inference servers are away from the makers of a task."""
    for each in view.findings:
        maker, _, of = each.subject.rpartition(" of ")
        if each.code == "waits-for-engine" and of == task:
            yield f"{maker}: {each.summary[:1].lower()}{each.summary[1:]}"
        elif each.code == "waits-for-engine" and each.subject == f"task {task}":
            yield each.summary


_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """The signal that asked the run to end."""

    number: int = 0

    @property
    def name(self) -> str:
        """Its name, such as SIGINT."""
        return signal.Signals(self.number).name

    @property
    def status(self) -> int:
        """The exit status of a process that it ended, as shells count."""
        return 128 + self.number


@contextmanager
def interrupts(wake: Callable[[], None], at_once: Callable[[], None]) -> Iterator[Interrupt]:
    """In this block Ctrl-C, SIGTERM and SIGHUP are noted; main thread only.

    The first signal calls `wake`, which must not block; a second one calls `at_once`, and raises
    KeyboardInterrupt.
    """
    interrupt = Interrupt()
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, _frame: FrameType | None) -> None:
        if interrupt.number:
            restore()
            at_once()
            raise KeyboardInterrupt
        interrupt.number = number
        wake()

    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP under nohup
            before[number] = signal.signal(number, handle)
    try:
        yield interrupt
    finally:
        restore()
