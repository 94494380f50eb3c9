"""`redrb run --on` without Ray: what an actor keeps running and reports, and who reads it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import redrb
from redrb.cli.run import ray_job, ray_worker
from redrb.cli.run.command import LaunchSettings, _extend, job_of
from redrb.cli.run.ray_job import LOST, RayProcess, check_reachable, job_on_ray
from redrb.cli.run.ray_worker import Assignment, Page, RayWorker
from redrb.cli.run.supervisor import Change, ProcessState, Restarted, Restarting, Supervisor
from redrb.cli.run.worker_process import Death
from redrb.errors import ConfigError
from redrb.recipe.command_line import parse

COUNTING = str(Path(__file__).parents[1] / "counting_recipe.py")

EVENT = {"time": 1.0, "worker": "trainer", "event": "step", "seconds": 2.0}

PROGRAM = f"""
import signal, sys, threading
if "hang" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print({json.dumps(EVENT)!r}, flush=True)
print("given", *sys.argv[1:], flush=True)
if "fail" in sys.argv:
    raise SystemExit("it failed")
threading.Event().wait()
"""

FIRST, SECOND = "b", "a"
"""Two runs that read."""


class Actor(RayWorker):
    """A worker whose actor leaves no cluster."""

    def __init__(self, assignment: Assignment) -> None:
        self.left = threading.Event()
        super().__init__(assignment)

    def _leave(self) -> None:
        self.left.set()


class Unreached(Exception):
    """Stands for an error of Ray."""


class Cluster:
    """Stands for Ray in an actor: each other actor has the result of its end, or None: no node."""

    exceptions = SimpleNamespace(RayError=Unreached)

    def __init__(self) -> None:
        self.ends: dict[str, Any] = {"trainer": None, "maker-1": "ended"}
        self.unreached = False
        self.waited: list[tuple[int, float]] = []
        self.killed: list[str] = []
        self.util = self.current_actor = self

    def list_named_actors(self) -> list[str]:
        if self.unreached:
            raise Unreached
        return list(self.ends)

    def get_actor(self, name: str) -> Any:
        if self.ends[name] == "gone":
            raise ValueError(name)
        return SimpleNamespace(name=name, end=SimpleNamespace(remote=lambda: name))

    def wait(self, calls: list[str], *, num_returns: int, timeout: float) -> None:
        self.waited.append((num_returns, timeout))

    def get(self, call: str, *, timeout: float) -> None:
        assert timeout == 0
        if self.ends[call] is None:
            raise Unreached

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(current_actor=SimpleNamespace(name="itself"))

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


@pytest.fixture
def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> Iterator[Callable[..., Actor]]:
    """Make actors that run a small program; they are ended with the test."""
    (tmp_path / "small_program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr("redrb.cli.run.supervisor.FIRST_DELAY_S", 0.01)
    made: list[Actor] = []

    def begin(*words: str, **changes: Any) -> Actor:
        assigned = replace(assignment(*words), **changes)
        made.append(Actor(assigned))
        return made[-1]

    yield begin
    for actor in made:
        actor.end()
        assert actor.left.wait(30)


def assignment(*words: str) -> Assignment:
    return Assignment(
        release=redrb.__version__,
        name="trainer",
        command=("small_program", *words),
        url=f"fake://{uuid.uuid4().hex}",
        namespace="n",
        task="t",
        restarts=1,
        ends_job=True,
        most_s=0.0,
        stop_s=10.0,
    )


def reports(actor: RayWorker, *, until: str) -> list[tuple[str, Any]]:
    """Read until a report of a kind comes."""
    found: list[tuple[str, Any]] = []
    begun, taken = "", 0
    while not any(kind == until for kind, _ in found):
        page = actor.read(FIRST, begun, taken)
        assert page is not None
        begun, taken = page.begun, page.first + len(page.reports)
        found += page.reports
    return found


def test_a_process_that_dies_is_started_again_in_its_actor_until_it_is_given_up(
    make: Callable[..., Actor],
) -> None:
    found = reports(make("fail"), until="end")
    kinds = [kind for kind, _ in found if kind in ("death", "started", "end")]
    assert kinds == ["death", "started", "end"]
    [(death, delay_s)] = [value for kind, value in found if kind == "death"]
    assert (death.status, death.reason, delay_s) == (1, "it failed", 0.01)
    assert found[-1][1].status == 1
    metrics = [json.loads(value) for kind, value in found if kind == "metrics"]
    assert metrics == [EVENT, EVENT]


def test_a_node_that_can_start_no_process_is_a_death(
    make: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("redrb.cli.run.worker_process.subprocess.Popen", full)
    found = reports(make(), until="end")
    assert [kind for kind, _ in found if kind != "log"] == ["death", "started", "end"]
    assert "Resource temporarily unavailable" in found[-1][1].reason


def test_a_trainer_that_is_started_again_has_the_time_that_is_left(
    make: Callable[..., Actor],
) -> None:
    found = reports(make("fail", most_s=9.0), until="end")
    log = b"".join(value for kind, value in found if kind == "log").decode()
    assert "given fail\n" in log
    assert "given fail --max-seconds=7.0\n" in log


def test_a_worker_ends_in_order_and_is_not_started_again(make: Callable[..., Actor]) -> None:
    actor = make()
    reports(actor, until="metrics")
    actor.end()
    [(kind, death)] = reports(actor, until="end")[-1:]
    assert (kind, death.status) == ("end", 0)
    assert actor.left.wait(10)


def test_a_worker_that_is_to_end_twice_gets_one_signal(
    make: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make("hang", stop_s=0.2)
    reports(actor, until="metrics")
    process, signals = actor._process, []
    assert process is not None
    monkeypatch.setattr(process, "terminate", lambda: signals.append("TERM"))
    monkeypatch.setattr(process, "kill", lambda: signals.append("KILL"))
    actor.end()
    actor.end()
    assert signals == ["TERM", "KILL", "KILL"]
    monkeypatch.undo()
    actor.end()


@pytest.mark.parametrize(
    ("ends", "deaths"), [({"trainer": None}, 0), ({"trainer": None, "maker-9": None}, 1)]
)
def test_a_trainer_without_makers_is_not_started_again(
    make: Callable[..., Actor], cluster: Cluster, ends: dict[str, Any], deaths: int
) -> None:
    cluster.ends = ends
    found = reports(make("fail"), until="end")
    assert [kind for kind, _ in found].count("death") == deaths
    assert found[-1][1].status == 1


def test_a_trainer_is_started_again_while_nobody_says_whether_it_has_makers(
    make: Callable[..., Actor], cluster: Cluster
) -> None:
    cluster.unreached = True
    assert [kind for kind, _ in reports(make("fail"), until="end")].count("death") == 1


def test_a_maker_is_started_again_without_others(
    make: Callable[..., Actor], cluster: Cluster
) -> None:
    cluster.ends = {"trainer": None}
    found = reports(make("fail", ends_job=False), until="end")
    assert [kind for kind, _ in found].count("death") == 1


def test_makers_that_wait_for_a_node_end_with_their_trainer(
    make: Callable[..., Actor], cluster: Cluster
) -> None:
    cluster.ends |= {"maker-2": None, "maker-3": "gone", "maker-4": None}
    actor = make()
    actor.end()
    reports(actor, until="end")
    page = actor.read(FIRST, "", 0)
    assert page is not None
    with ThreadPoolExecutor() as threads:
        threads.submit(actor.read, FIRST, page.begun, page.first + len(page.reports))
        RayWorker._leave(actor)
        actor.report("log", b"", 0)
    assert cluster.waited == [(3, 10.0)]
    assert cluster.killed == ["maker-2", "maker-4", "itself"]


def test_a_trainer_without_others_leaves_at_once(
    make: Callable[..., Actor], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "UNREAD_S", 0.0)
    cluster.ends = {"trainer": None}
    RayWorker._leave(make())
    assert cluster.killed == ["itself"]


def test_a_worker_that_does_not_end_is_killed(make: Callable[..., Actor]) -> None:
    actor = make("hang", stop_s=0.2)
    reports(actor, until="metrics")
    actor.end()
    assert reports(actor, until="end")[-1][1].status == -9


def test_a_worker_that_waits_for_its_restart_ends_at_once(
    make: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redrb.cli.run.supervisor.FIRST_DELAY_S", 60.0)
    actor = make("fail")
    reports(actor, until="death")
    actor.end()
    assert actor.left.wait(10)
    assert reports(actor, until="end")[-1][1].status == 0


def test_the_later_of_two_runs_reads_and_what_it_has_read_is_forgotten(
    make: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make()
    reports(actor, until="metrics")
    monkeypatch.setattr(ray_worker, "READ_S", 60.0)
    with ThreadPoolExecutor() as threads:
        page = actor.read(FIRST, "", 0)
        waiting = threads.submit(actor.read, FIRST, page.begun, page.first + len(page.reports))
        actor.report("log", b"for the second", 14)
        second = actor.read(SECOND, "", 0)
        assert second is not None
        waiting.result(10)
    assert actor.read(FIRST, page.begun, page.first) is None
    monkeypatch.setattr(ray_worker, "READ_S", 0.0)
    again = actor.read(SECOND, second.begun, second.first + len(second.reports))
    assert again is not None
    assert again.first == second.first + len(second.reports)


@pytest.mark.parametrize("begun", ["", "before it was lost"])
def test_a_run_that_does_not_know_an_actor_has_its_first_page_at_once(
    make: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    actor = make()
    while actor.read(FIRST, "", 0) is None or b"given" not in str(actor._reports).encode():
        threading.Event().wait(0.01)
    with actor._changed:
        while actor._reports:  # the run before has read them
            actor._forget()
    monkeypatch.setattr(ray_worker, "READ_S", 60.0)
    with ThreadPoolExecutor() as threads:
        page = threads.submit(actor.read, FIRST, begun, 0).result(10)
    assert page is not None
    assert page.reports == []


def test_an_actor_that_starts_again_goes_on_with_the_run_that_read_before(
    make: Callable[..., Actor],
) -> None:
    actor = make()
    assert actor.read(SECOND, "before it was lost", 3) is not None
    assert actor.read(FIRST, "before it was lost", 3) is None


def test_without_a_run_the_newest_reports_are_kept(
    make: Callable[..., Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "KEPT_BYTES", 100)
    actor = make()
    reports(actor, until="metrics")
    for number in range(1000):
        actor.report("log", number, 20)
    page = actor.read(SECOND, "", 0)
    assert page is not None
    assert [value for _, value in page.reports] == [995, 996, 997, 998, 999]
    rest = actor.read(SECOND, page.begun, page.first + 2)
    assert rest is not None
    assert (rest.first, [value for _, value in rest.reports]) == (page.first + 2, [997, 998, 999])


def test_an_actor_with_another_release_of_redrb_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.1 where the job was started: install the same"):
        RayWorker(replace(assignment(), release="0.0.1"))


class Lost(Exception):
    """Stands for Ray's error of an actor that it starts again."""


class Died(Lost):
    """Stands for Ray's error of an actor that is gone."""


class Disconnected(Exception):
    """Stands for another error of Ray."""


class StandIn:
    """Stands for Ray and an actor on it: each answer is a page, None or an error."""

    exceptions = SimpleNamespace(
        ActorDiedError=Died,
        ActorUnschedulableError=Died,
        RuntimeEnvSetupError=Died,
        RayActorError=Lost,
        RayError=Disconnected,
    )

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, str, int]] = []
        self.killed = threading.Event()
        self.said: list[str] = []
        self.changes: list[Change] = []
        self.over = threading.Event()
        self.written: dict[str, bytes] = {"metrics": b"", "log": b""}
        self.ray = self.read = self
        self.reader, self._retries = FIRST, 0
        self.running: list[str] = []
        self.ended, self.held = threading.Event(), threading.Event()
        self.held.set()
        self.unkillable = False
        self.closing: Future[None] = Future()
        self.late = threading.Event()
        self._threads = ThreadPoolExecutor(1)
        self.end = SimpleNamespace(remote=self.ended.set)

    def options(self, *, max_task_retries: int) -> StandIn:
        self._retries = max_task_retries
        return self

    def remote(self, _reader: Any, begun: str, taken: int) -> StandIn:
        self.asked.append((self._retries, begun, taken))
        return self

    def future(self) -> Future[Any]:
        return self._threads.submit(self._answer)

    def _answer(self) -> Any:
        if self.answers and self.answers[0] == "late":
            self.answers.pop(0)
            assert self.late.wait(10)
            self.late.clear()
        if not self.answers:
            assert self.killed.wait(10)
            raise Died("killed")
        answer = self.answers.pop(0)
        assert self.held.wait(10)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, _actor: object) -> None:
        self.killed.set()
        if self.unkillable:
            raise ConnectionError("gone")

    def complain(self, text: str) -> None:
        self.said.append(text)

    def leave(self, why: str) -> None:
        self.said.append(why)
        self.over.set()

    def unplaced(self, name: str) -> None:
        if f"{name} waits" not in self.said:
            self.said.append(f"{name} waits")
        self.late.set()

    def changed(self, change: Change) -> None:
        self.changes.append(change)
        if isinstance(change, Death):
            self.over.set()

    def follow(self, *, ended: bool = True) -> RayProcess:
        def file(name: str) -> Any:
            def write(lines: bytes) -> None:
                self.written[name] += lines

            return SimpleNamespace(write=write, close=lambda: None)

        job: Any = self
        process = RayProcess(
            job, "maker-1", self, "d", file("metrics"), file("log"), self.said.append, self.changed
        )
        if ended:
            assert self.over.wait(10)
        return process


LINE = json.dumps(EVENT).encode() + b"\n"
END = ("end", Death(0, 1.0, ""))


def page(begun: str, first: int, *found: tuple[str, Any]) -> Page:
    return Page(begun, "d", first, list(found))


def test_reports_of_a_worker_go_to_its_files_and_each_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_job, "UNPLACED_S", 0.2)
    ray = StandIn("late", page("x", 0, ("metrics", LINE), ("log", b"l")), page("x", 5, END))
    ray.follow()
    assert ray.asked == [(0, "", 0), (0, "x", 2)]
    assert ray.written["metrics"] == LINE
    assert ray.written["log"] == b"l--- 3 reports are missing: nobody read them\n"
    assert ray.said == ["maker-1 waits", EVENT]
    assert ray.changes == [END[1]]
    assert ray.killed.is_set()


def test_a_lost_actor_is_waited_for_by_ray_and_its_reports_are_numbered_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_job, "UNPLACED_S", 0.2)
    ray = StandIn(page("x", 0, ("log", b"a")), Lost(), Lost(), "late", page("y", 0, END))
    ray.follow()
    assert ray.asked == [(0, "", 0), (0, "x", 1), (-1, "x", 1), (-1, "x", 1)]
    assert ray.changes == [Restarting(Death(1, 0.0, "", how=LOST), None), Restarted(), END[1]]
    assert ray.said == ["maker-1 waits"]


def test_an_actor_that_was_lost_and_came_back_between_two_requests_is_reported() -> None:
    ray = StandIn(page("x", 0, ("log", b"a")), page("y", 0, END))
    ray.follow()
    assert ray.changes == [Restarting(Death(1, 0.0, "", how=LOST), None), Restarted(), END[1]]


def test_an_actor_that_is_reached_again_is_reported() -> None:
    ray = StandIn(page("x", 0, ("log", b"a")), Lost(), page("x", 1), page("x", 1, END))
    ray.follow()
    assert ray.changes == [Restarting(Death(1, 0.0, "", how=LOST), None), Restarted(), END[1]]


@pytest.mark.parametrize("answer", [page("x", 0, END), Lost()])
def test_a_run_that_can_end_no_actor_any_more_leaves_its_workers(answer: Any) -> None:
    ray = StandIn(answer)
    ray.unkillable = True
    ray.held.clear()
    process = ray.follow(ended=False)
    process._ending = True
    ray.held.set()
    assert ray.over.wait(10)
    assert ray.said == ["Ray cannot be reached any more, and the job goes on: gone"]


def test_a_worker_that_runs_ends_in_order_also_before_its_first_page() -> None:
    ray = StandIn(page("x", 0), page("x", 0, END))
    ray.running.append("maker-1")
    ray.held.clear()
    process = ray.follow(ended=False)
    process.terminate()
    assert not ray.killed.is_set()
    ray.held.set()
    assert ray.over.wait(10)
    assert ray.ended.is_set()
    assert ray.changes == [END[1]]


def test_a_process_that_its_actor_starts_again_is_reported() -> None:
    death = Death(1, 1.0, "no")
    ray = StandIn(page("x", 0, ("death", (death, 2.0)), ("started", None), END))
    ray.follow()
    assert ray.changes == [Restarting(death, 2.0), Restarted(), END[1]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "another `redrb run --on` follows"),
        (ConnectionError("gone"), "Ray cannot be reached any more, and the job goes on: gone"),
        (Disconnected("away"), "Ray cannot be reached any more, and the job goes on: away"),
    ],
)
def test_a_run_that_cannot_follow_leaves_its_workers(answer: Any, words: str) -> None:
    ray = StandIn(answer)
    ray.follow()
    assert words in ray.said[0]
    assert ray.changes == []
    assert not ray.killed.is_set()


def test_an_actor_that_cannot_be_made_is_given_up_with_its_reason() -> None:
    ray = StandIn(Died("ModuleNotFoundError: redrb"))
    ray.follow()
    [death] = ray.changes
    assert isinstance(death, Death)
    assert (death.status, death.why) == (2, "was ended by Ray")
    assert "ModuleNotFoundError: redrb" in death.detail


@pytest.mark.parametrize("answers", [[], [page("x", 0, ("log", b"a")), Lost()]])
def test_a_worker_that_no_node_runs_does_not_start_after_the_end(answers: list[Any]) -> None:
    ray = StandIn(*answers)
    process = ray.follow(ended=False)
    while ray.answers:
        threading.Event().wait(0.01)
    process._here = False
    process.terminate()
    assert ray.over.wait(10)
    assert ray.changes[-1] == Death(0, 0.0, "")


def test_a_worker_with_other_settings_is_followed_and_named() -> None:
    ray = StandIn(replace(page("x", 0, END), digest="other"))
    ray.follow()
    assert ray.said == ["maker-1 runs with other settings: to change them, end the job first"]


def test_the_supervisor_does_not_start_what_ray_starts_again() -> None:
    told: list[str] = []
    supervisor = Supervisor("trainer", lambda event, **_: told.append(event))
    started: list[str] = []
    changes: dict[str, Callable[[Change], None]] = {}

    def add(name: str) -> None:
        def start(on_change: Callable[[Change], None]) -> Any:
            started.append(name)
            changes[name] = on_change
            return SimpleNamespace(terminate=lambda: None, kill=lambda: None)

        supervisor.add_worker(name, start, 0)

    add("trainer")
    add("maker-1")
    supervisor.step(0)
    changes["trainer"](Restarting(Death(-9, 1.0, ""), 0.0))
    supervisor.step(0)
    supervisor.step(0)
    assert supervisor.states["trainer"] is ProcessState.WAITING
    changes["trainer"](Restarted())
    supervisor.step(0)
    assert supervisor.states["trainer"] is ProcessState.RUNNING
    assert (started, told) == (["trainer", "maker-1"], ["death", "restarted"])
    supervisor.leave("nobody looks")
    assert supervisor.over == "nobody looks"


@pytest.mark.parametrize(
    ("url", "nodes", "gcs", "words"),
    [
        ("", [], "", r"give --url redis://HOST:6380/0 .* not with port 6379 of Ray's head node"),
        ("embedded:///data", [], "", "embedded:///data is on this machine"),
        ("unix:///r.sock", [], "", "on this machine"),
        ("redis://localhost:1/0", ["10.0.0.1", "10.0.0.2"], "", "localhost is another machine"),
        ("redis+cluster://a:1,127.0.0.1:2", ["10.0.0.1", "10.0.0.2"], "", "127.0.0.1 is another"),
        (
            "redis+sentinel://localhost:1/s/0",
            ["10.0.0.1", "10.0.0.2"],
            "",
            "localhost is another machine",
        ),
        ("redis://10.0.0.1/0", ["10.0.0.1"], "10.0.0.1:6379", r"is Ray's own server \(GCS\)"),
        ("redis://localhost", ["10.0.0.1"], "10.0.0.1:6379", "such as 6380"),
    ],
)
def test_a_redis_that_nodes_do_not_reach_is_refused(
    url: str, nodes: list[str], gcs: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_reachable(url, nodes, gcs)


def test_a_redis_that_nodes_reach_is_taken() -> None:
    check_reachable("redis://10.0.0.1:6380/0", ["10.0.0.1", "10.0.0.2"], "10.0.0.1:6379")
    check_reachable("redis://10.0.0.3/0", ["10.0.0.1"], "10.0.0.1:6379")
    check_reachable("redis://localhost:6380", ["10.0.0.1", "10.0.0.1"], "10.0.0.1:6379")
    check_reachable("redis+sentinel://10.0.0.1:26379/s/0", ["10.0.0.1", "10.0.0.2"])


def test_a_server_beside_makers_that_do_not_use_it_is_refused() -> None:
    job = job_of(
        parse("redrb run", "", [COUNTING, "--url", "redis://10.0.0.1"], extend=_extend),
        LaunchSettings(on="auto"),
        Path("x"),
    )
    with pytest.raises(ConfigError, match="give --engine vllm"):
        ray_job.RayJob(
            "auto",
            job,
            folder="",
            out=Path("x"),
            gpus_per_maker=0,
            trainer_gpus=0,
            serve="vllm serve MODEL",
        )


def test_jobs_of_two_stores_are_two_jobs_and_a_password_makes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []

    class NoCluster:
        exceptions = StandIn.exceptions

        def init(self, _address: str, *, namespace: str, **_: object) -> None:
            names.append(namespace)
            raise (Disconnected if names[1:] else ConnectionError)("no cluster")

    monkeypatch.setitem(sys.modules, "ray", NoCluster())
    monkeypatch.setattr(ray_job, "require_package", lambda *_, **__: None)
    for url in ("redis://:secret@10.0.0.1/0", "redis://10.0.0.1", "redis://10.0.0.2"):
        monkeypatch.setenv("REDRB_URL", url)
        job, _ = on_ray()
        with pytest.raises(ConfigError, match=r"no cluster .* set RAY_AUTH_MODE=token"):
            ray_job.RayJob("auto", job, folder="", out=Path("x"), gpus_per_maker=0, trainer_gpus=0)
    assert names[0] == names[1] != names[2]
    assert "secret" not in names[0]


class Silent:
    """Stands for Ray, with actors that answer no request."""

    exceptions = StandIn.exceptions

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.readers: list[threading.Thread] = []
        self.read_at_shutdown: list[bool] = []
        self.util = self.read = self

    def init(self, *_: object, **__: object) -> None: ...

    def get_runtime_context(self) -> None: ...

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeManagerAddress": "10.0.0.1", "Alive": True}]

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def list_named_actors(self) -> list[str]:
        return []

    def options(self, **_: object) -> Silent:
        return self

    def remote(self, *_: object) -> Silent:
        return self

    def future(self) -> Future[Any]:
        self.asked.set()
        return Future()

    def shutdown(self) -> None:
        self.read_at_shutdown = [each.is_alive() for each in self.readers]


def test_a_run_asks_ray_nothing_after_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request after Ray's shutdown would connect again, or end the process with status 1."""
    ray, said = Silent(), list[str]()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_job, "require_package", lambda *_, **__: None)
    monkeypatch.setenv("REDRB_URL", "redis://10.0.0.1:6380/0")
    found, _ = on_ray()
    job = ray_job.RayJob("auto", found, folder="", out=Path("x"), gpus_per_maker=0, trainer_gpus=0)
    job.leave = said.append
    output: Any = SimpleNamespace()
    process = job.start(
        "maker-1",
        stop_s=1.0,
        metrics=output,
        log=output,
        on_event=lambda _: None,
        on_change=lambda _: None,
    )
    ray.readers.append(process.reader)
    assert ray.asked.wait(10)
    job.close()
    assert ray.read_at_shutdown == [False]
    assert said == []


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ray_job.RayJob, Silent]]:
    """A job with three workers whose requests to Ray do not end."""
    ray, over = Silent(), threading.Event()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_job, "require_package", lambda *_, **__: None)
    monkeypatch.setenv("REDRB_URL", "redis://10.0.0.1:6380/0")
    found, _ = on_ray()
    job = ray_job.RayJob("auto", found, folder="", out=Path("x"), gpus_per_maker=0, trainer_gpus=0)
    ray.readers = [threading.Thread(target=over.wait, args=(60,), daemon=True) for _ in range(3)]
    for reader in ray.readers:
        reader.start()
        process: Any = SimpleNamespace(reader=reader)
        job._followed.append(process)
    yield job, ray
    over.set()


def test_a_run_waits_once_for_all_requests_that_do_not_end(
    followed: tuple[ray_job.RayJob, Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, ray = followed
    monkeypatch.setattr(ray_job, "CLOSE_S", 1.0)
    began = time.monotonic()
    job.close()
    assert 0.9 < time.monotonic() - began < 2.0
    assert ray.read_at_shutdown == [True] * 3


def test_ctrl_c_while_a_run_waits_for_requests_leaves_ray_too(
    followed: tuple[ray_job.RayJob, Silent],
) -> None:
    job, ray = followed
    job._followed = job._followed[1:]

    def interrupted(timeout: float) -> None:
        raise KeyboardInterrupt

    ray.readers[1].join = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        job.close()
    assert ray.read_at_shutdown == [True] * 3


def on_ray(*words: str, recipe: str = COUNTING) -> tuple[Any, str]:
    parsed = parse("redrb run", "", [recipe, "--on", "auto", *words], extend=_extend)
    settings = LaunchSettings(on="auto")
    return job_on_ray(parsed, job_of(parsed, settings, Path("runs/x/checkpoints")))


def test_workers_on_other_nodes_get_all_settings_as_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.toml").write_text("steps = 7\n")
    monkeypatch.setenv("REDRB_SEED", "3")
    monkeypatch.setenv("REDRB_URL", "redis://:secret@10.0.0.1/0")
    job, folder = on_ray("--settings", str(tmp_path / "file.toml"), "--fails", "maker-9")
    assert folder == str(Path(COUNTING).parent)
    module, name, *flags = job.command("maker-1")
    assert (module, name) == ("redrb.cli.processes.maker", "counting_recipe.py")
    expected = {"--steps=7", "--seed=3", "--fails=maker-9", "--namespace=counting"}
    assert set(flags) == {*expected, "--worker=maker-1", "--metrics=-"}


def test_folders_of_one_machine_are_no_place_for_checkpoints_of_a_cluster() -> None:
    job, _ = on_ray("--checkpoints", "/shared/checkpoints")
    assert "--checkpoints=/shared/checkpoints" in job.command("trainer")
    with pytest.raises(ConfigError, match="the absolute path"):
        on_ray("--checkpoints", "checkpoints")


@pytest.mark.parametrize("recipe", ["sorting", "redrb.recipe.examples.sorting"])
def test_a_recipe_of_redrb_is_on_the_nodes(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job, folder = on_ray(recipe=recipe)
    assert (job.name, folder) == (recipe, "")


def test_a_ray_job_has_brought_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    job, folder = on_ray()
    assert (job.name, folder) == (COUNTING, "")


def test_ray_is_asked_for_only_when_the_redis_is_reachable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from redrb.cli import __main__ as cli

    monkeypatch.delenv("REDRB_URL", raising=False)
    assert cli.main(["run", COUNTING, "--on", "auto"]) == 2
    assert "--on needs a Redis that all nodes reach" in capsys.readouterr().err
    monkeypatch.setattr(ray_job, "require_package", _absent)
    assert cli.main(["run", COUNTING, "--on", "auto", "--url", "redis://10.0.0.1:6380"]) == 2
    assert "ray is not installed" in capsys.readouterr().err


def _absent(package: str, *, extra: str) -> None:
    raise ConfigError(f"{package} is not installed: pip install {extra}")
