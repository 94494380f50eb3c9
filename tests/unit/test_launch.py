"""When processes are restarted and given up; the time of training over several processes."""

from __future__ import annotations

import inspect
import io
import json
import math
import re
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import redrb
from redrb.cli.processes import maker, trainer
from redrb.cli.processes.metrics_log import MetricsLog, RecordFile
from redrb.cli.run.folder import Owner, RunFolder
from redrb.cli.run.history import JobEvents
from redrb.cli.run.job import Job, delete_job
from redrb.cli.run.report import progress_line, summary, table
from redrb.cli.run.server import RunServer, server_for, watch_advice
from redrb.cli.run.supervisor import ProcessState, Restarts, Supervisor, _Process
from redrb.cli.run.worker_process import Death, OnEnd, WorkerProcess, event_in
from redrb.connection import Client
from redrb.connection.embedded import EmbeddedServer
from redrb.errors import ConfigError
from redrb.recipe.examples.sorting import Sorting
from redrb.recipe.trainer import RecipeTrainer
from redrb.recipe.trainer_report import TrainerReport
from tests.counting_recipe import Counting
from tests.disks import fill, small_disk
from tests.samples import numbered


def test_delays_grow_and_are_forgotten_after_a_process_ran_well() -> None:
    restarts = Restarts(8)
    delays = [restarts.delay_s(Death(1, 1, "")) for _ in range(9)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, None]
    assert restarts.delay_s(Death(1, 60, "")) == 1
    assert restarts.delay_s(Death(1, 59, "")) == 2


class Running:
    """Stands for a process that runs until the test ends it."""

    def __init__(self, on_end: OnEnd) -> None:
        self.on_end = on_end
        self.asked: list[str] = []
        self.hangs = False

    def terminate(self) -> None:
        self.asked.append("terminate")
        if not self.hangs:
            self.on_end(Death(0, 1, ""))

    def kill(self) -> None:
        self.asked.append("kill")
        self.on_end(Death(-9, 1, ""))


class Supervised:
    """A supervisor of processes that the test ends, with what it reported."""

    def __init__(self, *makers: str, restarts: int = 3) -> None:
        self.reports: list[tuple[str, Any]] = []
        self.started: dict[str, list[Running]] = {}
        self.supervisor = Supervisor("trainer", self._report)
        self.supervisor._parts["the server"] = self._part("the server")
        for name in ("trainer", *makers):
            self.supervisor.add_worker(name, self._starter(name), restarts)
        self.supervisor.step(0)

    def _report(self, event: str, **values: Any) -> None:
        self.reports.append((event, values.get("worker")))

    def _starter(self, name: str) -> Any:
        def start(on_end: OnEnd) -> Any:
            running = Running(on_end)
            self.started.setdefault(name, []).append(running)
            return running

        return start

    def _part(self, name: str) -> Any:
        return _Process(name, self._starter(name), Restarts(0))

    def end(self, name: str, status: int, *, ran_s: float = 100) -> None:
        self.started[name][-1].on_end(Death(status, ran_s, "why"))
        self.supervisor.step(0)


def test_a_worker_with_a_wrong_configuration_is_not_restarted() -> None:
    run = Supervised("maker-1", "maker-2")
    run.end("maker-1", 2)
    assert run.reports == [("given_up", "maker-1")]
    assert run.supervisor.over == ""
    run.end("maker-2", 2)
    assert run.supervisor.over == "all makers were given up"


def test_the_end_of_the_trainer_is_the_end_of_the_run() -> None:
    run = Supervised("maker-1")
    run.end("maker-1", 0)
    assert run.supervisor.over == ""  # groups wait for the trainer
    run.end("trainer", 0)
    assert run.supervisor.over == "the trainer has ended"
    assert run.supervisor.states["trainer"] is ProcessState.DONE


def test_a_trainer_that_fails_without_makers_is_not_restarted() -> None:
    run = Supervised("maker-1")
    run.end("maker-1", 0)
    run.end("trainer", 1)
    assert run.supervisor.over == "trainer was given up"


def test_a_server_that_waits_for_its_restart_is_started_before_the_workers_end() -> None:
    run = Supervised("maker-1")
    server = run.supervisor._parts["the server"]
    server.restarts.most = 3
    server.worker = None  # as that of servers
    started: list[list[str]] = []

    def start(_on_end: OnEnd) -> None:
        started.append(list(run.started["maker-1"][0].asked))

    server.start = start
    run.supervisor.happenings.put(("the server", Death(-9, 1, "")))  # not noticed yet
    run.supervisor.end_workers(60, makers_s=60)
    assert started == [[]]  # before the makers were asked to end
    assert run.started["maker-1"][0].asked == ["terminate"]
    assert run.supervisor.states["the server"] is ProcessState.RUNNING


def test_a_maker_that_hangs_is_killed_before_the_time_of_the_trainer_is_up() -> None:
    run = Supervised("maker-1")
    run.supervisor._parts["the server"].process = None
    run.started["maker-1"][0].hangs = True
    run.supervisor.end_workers(10_000, makers_s=0)
    assert run.started["maker-1"][0].asked[:2] == ["terminate", "kill"]
    assert run.started["trainer"][0].asked == ["terminate"]
    assert run.supervisor.states["trainer"] is ProcessState.DONE


def test_seconds_of_a_trainer_that_starts_again_follow_those_before() -> None:
    history = JobEvents()
    step = {"event": "step", "samples": 4, "weight_version": 1}
    step |= {"staleness_mean": 0.0, "staleness_max": 0, "wait_for_batch_s": 1.0}
    for seconds, trained_s in ((1.0, 1.0), (3.0, 3.0), (0.5, 3.5), (2.0, 5.0)):
        history.add({**step, "seconds": seconds})
        assert history.trained_s == trained_s
    assert history.wait_for_batch_s == 2.0  # not the waits for makers to start


def test_steps_that_a_restarted_trainer_repeats_count_once() -> None:
    history = JobEvents()
    for step in (1, 2, 3, 3, 4):  # killed after step 3, with a checkpoint of step 2
        history.add({"event": "step", "step": step, "samples": 4, "seconds": 1.0})
    assert history.steps == 4
    assert history.samples == 20


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text", [1], True])
@pytest.mark.parametrize("missing", [False, True])
def test_no_event_breaks_the_line_or_the_figures(value: Any, missing: bool) -> None:
    history = JobEvents()
    for kind in ("evaluation", "step", "publish", "put", "end", "finished", "death", value):
        names = re.findall(r'"(\w+)"', inspect.getsource(JobEvents))
        history.add({"event": kind} if missing else {**dict.fromkeys(names, value), "event": kind})
    history.add({"event": "evaluation", "reward": 0.5, "seconds": 2.0, "weight_version": 3})
    assert (history.reward_first, history.reward_last) == (0.5, 0.5)
    assert "reward 0.500" in progress_line(1.0, history, None)
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    console.print(table(summary(1.0, history, None), history, None))
    json.dumps(summary(1.0, history, None), allow_nan=False)
    assert "0.500" in text.getvalue()


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    values = {"a": math.nan, "b": {"c": [math.inf, 1.5, True]}, "d": torch.tensor(math.nan)}
    values |= {"e": torch.tensor(2.0), "f": torch.ones(2), "g": None}
    with MetricsLog(str(tmp_path / "metrics"), worker="w") as log:
        log.write("step", **values)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    event = json.loads((tmp_path / "metrics").read_text(), parse_constant=refuse)
    assert event["a"] is event["d"] is event["g"] is None
    assert event["b"] == {"c": [None, 1.5, True]}
    assert event["e"] == 2.0
    assert event["f"].startswith("tensor(")


def test_a_restarted_trainer_has_the_time_that_is_left() -> None:
    job = Job(
        title="t",
        name="sorting",
        recipe=Sorting(max_seconds=90.0),
        given={"max_seconds": 90.0},
        makers=1,
        restarts=0,
    )
    assert "--max-seconds=90.0" in job.command("trainer")
    assert "--max-seconds=30.0" in job.command("trainer", trained_s=60)
    assert "--worker=maker-1" in job.command("maker-1", trained_s=60)


def test_torn_lines_of_killed_processes_are_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    event = json.dumps({"event": "end", "why": "it is over"})
    folder.metrics("trainer").write_text(f'{event}\n{{"event": "st\n{event}\n[1]\n')
    assert len(list(folder.events())) == 2


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.used(), pytest.raises(ConfigError, match="another run uses"), folder.used():
        pass


def test_workers_of_a_run_that_was_killed_keep_the_folder_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    with folder.used():
        assert folder.workers_lock is not None
        worker = subprocess.Popen(
            [sys.executable, "-c", "input()"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[folder.workers_lock],
        )
    with worker:
        monkeypatch.setattr("redrb.cli.run.folder.WORKERS_END_S", 0.1)
        with pytest.raises(ConfigError, match=r"an earlier run in .*fuser"), folder.used():
            pass
        monkeypatch.setattr("redrb.cli.run.folder.WORKERS_END_S", 60.0)
        end = threading.Timer(0.2, worker.kill)
        end.start()
        with folder.used():
            assert worker.wait() == -9
        end.join()


def test_the_server_of_a_run_keeps_the_folder_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as name:  # a short path
        folder = RunFolder(Path(name))
        server = RunServer(directory=str(folder.redis))
        with folder.used():
            server.lock = folder.workers_lock
            server.start(lambda _: None)
        with closing(server):
            monkeypatch.setattr("redrb.cli.run.folder.WORKERS_END_S", 0.1)
            with pytest.raises(ConfigError, match="an earlier run"), folder.used():
                pass
        monkeypatch.undo()
        with folder.used():
            pass


KILLED = "was killed by SIGKILL (by the kernel if the machine ran out of memory, or by someone)"

A = Owner("A", __file__)


@pytest.mark.parametrize(
    ("owner", "same"),
    [
        (A, True),
        (replace(A, recipe="B"), False),  # another class of the same file
        (replace(A, file=str(Path(__file__).parent)), False),
        (replace(A, demo=True), False),
    ],
)
def test_a_folder_of_another_recipe_is_refused(tmp_path: Path, owner: Owner, same: bool) -> None:
    folder = RunFolder(tmp_path)
    folder.check_owner(owner)  # an empty folder belongs to nobody
    began = {"event": "began", **asdict(A)}
    folder.diary.write_text(json.dumps(began) + '\n{"event": "finished"}\n')
    if same:
        folder.check_owner(owner)
        return
    with pytest.raises(ConfigError) as caught:
        folder.check_owner(owner)
    for part in (str(A), str(owner), "--out"):
        assert part in str(caught.value)
    assert ("--fresh" in str(caught.value)) is not owner.demo


def test_a_recipe_whose_file_was_moved_keeps_its_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    gone = replace(A, file=str(tmp_path / "gone.py"))
    folder.diary.write_text(json.dumps({"event": "began", **asdict(gone)}) + "\n")
    said = folder.check_owner(A)  # it may be a copy that was edited: the job is another one then
    assert all(each in said for each in (str(tmp_path), gone.file, A.file, "--out", "--fresh"))
    folder.diary.write_text(json.dumps({"event": "began", **asdict(A)}) + "\n")
    assert folder.check_owner(A) == ""


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (Death(1, 1.0, "Traceback\nValueError: no"), "ended with status 1: ValueError: no"),
        (
            Death(-9, 1.0, "a\nb\nc\nd"),
            f"{KILLED}; last lines of its log:\n  b\n  c\n  d",
        ),
        (Death(-11, 1.0, ""), "was killed by SIGSEGV"),
        (
            Death(1, 1.0, "saved", explains=False),
            "ended with status 1; last lines of its log:\n  saved",
        ),
    ],
)
def test_the_log_is_the_reason_only_of_a_process_that_ended_by_itself(
    death: Death, words: str
) -> None:
    assert death.why + death.brief == words
    assert death.detail.startswith("last lines of its log:") is ("last lines" in words)


def test_a_server_that_ends_in_order_is_started_again() -> None:
    run = Supervised("maker-1")
    run.supervisor._parts["the server"].restarts.most = 1
    run.end("the server", 0)
    assert run.reports == [("death", "the server")]


class Wider(Counting):
    """Has another model."""

    def models(self) -> dict[str, nn.Module]:
        """Return a layer of another shape."""
        return {"actor": nn.Linear(2, 1)}

    def evaluate(self, models: dict[str, nn.Module]) -> None:
        """Measure nothing."""
        return


@pytest.mark.parametrize("command", [maker, trainer])
def test_weights_of_another_shape_end_makers_and_trainers_with_the_same_status(
    command: Any, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, file = f"fake://{namespace}", Path(__file__).parents[1] / "counting_recipe.py"
    wider = Wider(task="counting", worker="trainer")
    with redrb.connect(url) as client, torch.random.fork_rng(devices=[]):
        with RecipeTrainer(client, wider, lambda *_, **__: None) as published:
            published.begin()
        status = command.main([str(file), "--url", url, "--weights-timeout", "20"])
    assert status == 2
    assert "actor.weight" in capsys.readouterr().err


def test_a_path_too_long_for_a_socket_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"redis\.sock has 1\d\d bytes.* --out"):
        server_for("", tmp_path / ("x" * 100))


def test_the_url_of_the_runs_own_server_starts_it_where_it_does_not_run() -> None:
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as listening:
        path = Path(name) / "redis.sock"
        url = f"unix://{path}"
        assert server_for(url, Path(name)).own
        assert not server_for(f"{url}2", Path(name)).own
        with pytest.raises(ConfigError, match="no replicas"):
            server_for(url, Path(name), min_replicas=1)
        listening.bind(str(path))
        assert server_for(url, Path(name)).own  # a killed server leaves its file
        listening.listen()
        assert not server_for(url, Path(name)).own


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("unix:///r/redis.sock", ": REDRB_URL=unix:///r/redis.sock redrb top --namespace n"),
        ("unix:///a b/r.sock", ": REDRB_URL='unix:///a b/r.sock' redrb top --namespace n"),
        (
            "redis://u:secret@host:6379/0",
            ", where REDRB_URL must be set to the URL of this run: redrb top --namespace n",
        ),
    ],
)
def test_the_command_that_watches_a_run_has_no_password(url: str, text: str) -> None:
    assert watch_advice(url, "n") == f"watch it in another terminal{text}"


def test_the_command_that_watches_a_run_has_the_path_of_a_program_that_is_not_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `make demo`, which runs that of a virtual environment that is not active."""
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "redrb").touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["here/redrb", "demo"])
    for path, program in (("there", tmp_path / "here" / "redrb"), ("here", "redrb"), ("", None)):
        monkeypatch.setenv("PATH", str(tmp_path / path))
        said = watch_advice("redis://localhost:1/0", "n")
        expected = program or tmp_path / "here" / "redrb"
        assert said.endswith(f" REDRB_URL=redis://localhost:1/0 {expected} top --namespace n")


def test_a_fresh_run_deletes_its_job_and_nothing_else(namespace: str) -> None:
    with redrb.connect(f"fake://{namespace}") as client:
        for task in ("sort", "other"):
            with redrb.ExperienceStream(client, task, namespace=namespace) as stream:
                stream.put(numbered(1))
            for name in (task, f"{task}-reference"):
                with redrb.WeightPublisher(client, name, namespace=namespace) as publisher:
                    publisher.publish({"weight": torch.ones(3)})
        delete_job(client, Sorting(namespace=namespace))
        delete_job(client, Sorting(namespace=namespace))
        assert _versions(client, "sort", namespace) == [None, None]
        assert _versions(client, "other", namespace) == [1, 1]
        with redrb.ExperienceStream(client, "other", namespace=namespace) as stream:
            assert stream.stats().ledger.put == 1


def test_a_fresh_run_deletes_no_data_of_a_server_that_runs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    with closing(EmbeddedServer(str(folder.redis))) as server:
        before = sorted(folder.redis.iterdir())
        with pytest.raises(
            ConfigError, match=f"in use .* connect to it with unix://{folder.redis}"
        ):
            folder.clear_state()
        assert sorted(folder.redis.iterdir()) == before
        assert folder.checkpoints.exists()
        with redrb.connect(f"unix://{server.socket}") as client:
            client.execute("SET", "kept", "1")
    folder.clear_state()
    assert [found.name for found in folder.redis.iterdir()] == ["redrb.lock"]
    assert not folder.checkpoints.exists()


def _versions(client: Client, name: str, namespace: str) -> list[int | None]:
    names = (name, f"{name}-reference")
    latest = [redrb.WeightSubscriber(client, each, namespace=namespace).latest() for each in names]
    return [each and each.version for each in latest]


def test_a_job_that_has_all_its_steps_is_over_when_its_trainer_begins() -> None:
    reasons: list[str] = []
    trainer: Any = SimpleNamespace(weight_version=21, reward_at_end=None, stop=reasons.append)
    report = TrainerReport(trainer, Sorting(steps=20), lambda: None, lambda *_, **__: None)
    report.begin(19)
    report.measure()
    assert not report.reached
    report.begin(20)
    report.measure()
    assert report.reached
    assert reasons == ["20 steps are done,"]


@pytest.mark.parametrize(
    ("line", "is_event"),
    [
        (b'{"time": 1, "worker": "trainer", "event": "step"}\n', True),
        (b'{"time": 1, "worker": "trainer", "event": "step"', False),  # torn by SIGKILL
        (b'{"event": "of the recipe"}\n', False),
        (b"{a line of the recipe}\n", False),
        (b"reward: 1.0\n", False),
    ],
)
def test_what_a_recipe_prints_is_no_event(line: bytes, is_event: bool) -> None:
    assert (event_in(line) is not None) is is_event


def test_a_torn_last_line_ends_before_the_next_run_appends(tmp_path: Path) -> None:
    file = tmp_path / "trainer.jsonl"
    file.write_bytes(b'{"event": "st')
    for _ in range(2):
        appended = RecordFile(file, print)
        appended.write(b"{}\n")
        appended.close()
    assert file.read_bytes() == b'{"event": "st\n{}\n{}\n'


def test_a_full_disk_of_logs_drops_lines_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    events: list[str] = []
    deaths: list[Death] = []
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "for number in range(50):\n"
        "    print(f'line {number} ' + 'x' * 500)\n"
        "    print('error', number, file=sys.stderr)\n"
        '    print(f\'{{"time": 1, "worker": "w", "event": "{number}"}}\', flush=True)\n'
        "sys.exit('the reason')\n"
    )
    with small_disk(tmp_path / "disk", "64k") as disk:
        filler = fill(disk)
        metrics, log = (RecordFile(disk / name, said.append) for name in ("jsonl", "log"))
        process = WorkerProcess(
            ["program"],
            environment={"PYTHONPATH": str(tmp_path)},
            metrics=metrics,
            log=log,
            on_event=lambda event: events.append(event["event"]),
            on_end=deaths.append,
        )
        assert process.ended.wait(60)
        assert events == [str(number) for number in range(50)]
        assert deaths[0].status == 1
        assert deaths[0].reason.endswith("the reason")
        assert len(said) == 2  # once for each file
        assert all("dropped, and the job goes on: No space left" in text for text in said)
        with MetricsLog(str(disk / "run"), worker="run", say=said.append) as diary:
            diary.write("lost")
            filler.unlink()
            diary.write("kept")
        assert len(said) == 3
        kept = [json.loads(line) for line in (disk / "run").read_text().splitlines() if line]
        assert kept[-1]["event"] == "kept"
