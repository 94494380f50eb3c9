"""The workers of a job on a Ray cluster: starts them as actors, or follows those that run."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redrb
from redrb import environment
from redrb.checks import require_package
from redrb.cli.processes.lifetime import WRONG_CONFIGURATION
from redrb.cli.run.job import TRAINER, Job
from redrb.cli.run.ray_worker import DEATH, END, LOG, METRICS, Assignment, Page, RayWorker
from redrb.cli.run.supervisor import OnChange, Restarted, Restarting
from redrb.cli.run.worker_process import Death, OnEvent, Output, event_in
from redrb.connection.url import parse_address
from redrb.errors import ConfigError
from redrb.recipe.loading import file_of, shipped

if TYPE_CHECKING:
    from redrb.recipe.command_line import Parsed

UNPLACED_S = 30.0
"""Seconds after which the run says that the cluster has no room for a worker."""

CLOSE_S = 10.0
"""Longest wait for all requests to Ray that are under way when the run leaves it."""

VLLM = (
    """--weight-transfer-config '{"backend": "redrb"}' --enable-scale-out """
    "--logprobs-mode processed_logprobs"
)
"""Flags with which vLLM takes weights from Redis."""

LOST = "was lost with its actor or its node"

_NOT_6379 = "not with port 6379 of Ray's head node, where Ray's own server listens by default"

_IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets in the entry point of `ray job submit`."""

_OF_ONE_PROCESS = ("url", "worker", "metrics")


def job_on_ray(parsed: Parsed, job: Job) -> tuple[Job, str]:
    """Return a job as other nodes start it, and the folder that they need for its recipe.

    Workers get all settings as flags: files and variables of this machine are not on the nodes.
    The folder is "" if the recipe is installed there, or if a Ray job has brought it.

    Raises:
        ConfigError: Checkpoints are to go to a folder of this machine.
    """
    place, colon, wanted = parsed.name.partition(":")
    given = {
        name: getattr(job.recipe, name)
        for name, origin in parsed.origins.items()
        if not origin.startswith(("default", "recipe ")) and name not in _OF_ONE_PROCESS
    }
    checkpoints = job.recipe.checkpoints
    if checkpoints and not Path(checkpoints).is_absolute():
        raise ConfigError(
            f"--checkpoints {checkpoints}: with --on, give the absolute path of a folder that all "
            "nodes share, or none; then a trainer goes on from the published weights."
        )
    job = replace(job, given={**given, **job.given}, settings_file="", inherits=False)
    if environment.variable(_IN_RAY_JOB) or place in shipped():
        return job, ""
    file = Path(place).resolve()
    if file.is_file():
        return replace(job, name=file.name + colon + wanted), str(file.parent)
    here = Path.cwd()
    return job, str(here) if Path(file_of(type(job.recipe))).is_relative_to(here) else ""


class RayJob:
    """The workers of a job on a Ray cluster; they go on without this process.

    Attributes:
        ray: The module.
        reader: Names this process among those that follow the job.
        running: The workers that ran before: they are followed, not started.
        complain: Is called with what a person should know.
        leave: Is called with the reason when the workers, which go on, cannot be followed.
        closing: Is done when the run leaves the cluster; no request follows.
    """

    def __init__(
        self,
        address: str,
        job: Job,
        *,
        folder: str,
        out: Path,
        gpus_per_maker: float,
        trainer_gpus: float,
        serve: str = "",
    ) -> None:
        """Connect to the cluster; in the main thread, before signals are handled.

        Args:
            folder: What the nodes need for the recipe; "": nothing.
            out: Folder of the run, which they do not need.
            trainer_gpus: Below 0: one if the cluster has any.
            serve: Command of the inference server of each maker; "": makers start none.

        Raises:
            ConfigError: The recipe samples from no server, Ray is not installed here, there is no
                such cluster, or its nodes cannot reach the Redis of the job.
        """
        recipe = job.recipe
        check_reachable(recipe.url, [])
        where = parse_address(recipe.url).where
        engine = getattr(recipe, "engine", "local")
        if serve and engine == "local":
            raise ConfigError(
                "--serve is for makers that sample from a server: give --engine vllm."
            )
        self._serve = f"{serve} {VLLM}" if serve and engine == "vllm" else serve
        require_package("ray", extra="ray")
        import ray

        self.ray, self._job = ray, job
        self.reader = uuid.uuid4().hex
        self.complain: Callable[[str], None]
        self.leave: Callable[[str], None]
        self.closing: Future[None] = Future()
        self._followed: list[RayProcess] = []
        self._unplaced = False
        brought: dict[str, Any] = {}
        if folder:
            brought = {"working_dir": folder, "excludes": ["runs/"]}
            with contextlib.suppress(ValueError):  # it is elsewhere
                brought["excludes"].append(f"/{out.resolve().relative_to(folder)}/")
        try:
            ray.init(
                address,
                namespace=f"redrb {where} {recipe.namespace} {recipe.task_name}",
                runtime_env=brought or None,
                log_to_driver=False,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"--on {address}: there is no such cluster, or it cannot be used: {error} Give "
                "ray://HEAD:10001, or auto on a node of the cluster. If the cluster has a token, "
                "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN."
            ) from error
        nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        check_reachable(recipe.url, nodes, getattr(ray.get_runtime_context(), "gcs_address", ""))
        if trainer_gpus < 0:
            trainer_gpus = min(1.0, ray.cluster_resources().get("GPU", 0.0))
        self._trainer_gpus, self._gpus_per_maker = trainer_gpus, gpus_per_maker
        self.running: list[str] = sorted(ray.util.list_named_actors())

    @property
    def names(self) -> list[str]:
        """Names of all workers: those that run, and those that the job is to have."""
        return list(dict.fromkeys([TRAINER, *self._job.maker_names, *self.running]))

    def start(
        self,
        name: str,
        *,
        stop_s: float,
        metrics: Output,
        log: Output,
        on_event: OnEvent,
        on_change: OnChange,
    ) -> RayProcess:
        """Start a worker, or follow it if it runs; it has `stop_s` seconds after SIGTERM."""
        job, recipe, trains = self._job, self._job.recipe, name == TRAINER
        command = job.command(name)
        if self._serve and not trains:
            command = ["redrb.cli.processes.engine_maker", self._serve, *command[1:]]
        assigned = Assignment(
            release=redrb.__version__,
            name=name,
            command=tuple(command),
            url=recipe.url,
            namespace=recipe.namespace,
            task=recipe.task_name,
            restarts=job.restarts,
            ends_job=trains,
            most_s=recipe.max_seconds if trains else 0.0,
            stop_s=stop_s,
        )
        actor = self.ray.remote(RayWorker).options(
            name=name,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=8,
            num_cpus=recipe.threads,
            num_gpus=self._trainer_gpus if trains else self._gpus_per_maker,
            scheduling_strategy="DEFAULT" if trains else "SPREAD",
        )
        process = RayProcess(
            self, name, actor.remote(assigned), assigned.digest, metrics, log, on_event, on_change
        )
        self._followed.append(process)
        return process

    def unplaced(self, name: str) -> None:
        """Say once that the cluster has no room for a worker."""
        if not self._unplaced:
            self._unplaced = True
            self.complain(f"{name} waits for a node with room for it: `ray status` shows demands")

    def close(self) -> None:
        """Disconnect; workers that have not ended go on."""
        self.closing.set_result(None)
        until = time.monotonic() + CLOSE_S
        try:
            for process in self._followed:  # a request after the shutdown would end this process
                process.reader.join(max(0.0, until - time.monotonic()))
        finally:
            self.ray.shutdown()


class RayProcess:
    """A worker in its actor.

    Attributes:
        reader: The thread that reads its reports and passes them on, until `RayJob.closing`.
    """

    def __init__(
        self,
        job: RayJob,
        name: str,
        actor: Any,
        digest: str,
        metrics: Output,
        log: Output,
        on_event: OnEvent,
        on_change: OnChange,
    ) -> None:
        """Begin to read; `digest` is that of its assignment if this run has started it."""
        self._job, self._name, self._actor, self._digest = job, name, actor, digest
        self._metrics, self._log = metrics, log
        self._on_event, self._on_change = on_event, on_change
        self._begun, self._taken = "", 0
        self._here = self._ending = False
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def terminate(self) -> None:
        """Let it end in order; one that no node runs does not start."""
        self._ending = True
        if self._here:
            self._actor.end.remote()
        elif self._begun or self._name not in self._job.running:
            self.kill()  # else its first page is on the way

    def kill(self) -> None:
        """End it and its actor at once."""
        self._ending = True
        self._job.ray.kill(self._actor)

    def _read(self) -> None:
        errors = self._job.ray.exceptions
        final = errors.ActorDiedError, errors.ActorUnschedulableError, errors.RuntimeEnvSetupError
        try:
            while True:
                try:
                    page = self._page()
                except errors.ActorDiedError:
                    raise
                except errors.RayActorError:
                    self._lost()
                    continue
                if page is None:
                    self._leave("another `redrb run --on` follows this job now")
                    return
                if self._take(page):
                    return
        except final as error:
            self._end(self._death_of_actor(str(error)))
        except (ConnectionError, errors.RayError) as error:
            self._leave(f"Ray cannot be reached any more, and the job goes on: {error}")

    def _leave(self, why: str) -> None:
        if not self._job.closing.done():  # else the run has left
            self._job.leave(why)

    def _page(self) -> Page | None:
        """Return the next reports; None: another run reads them, or this one is closing.

        While a lost actor is not back, Ray repeats the request.
        """
        lost = bool(self._begun) and not self._here
        method = self._actor.read.options(max_task_retries=-1 if lost else 0)
        asked = method.remote(self._job.reader, self._begun, self._taken).future()
        either: set[Future[Any]] = {asked, self._job.closing}
        while not (done := wait(either, UNPLACED_S, FIRST_COMPLETED).done):
            if not self._here:
                self._job.unplaced(self._name)
        page: Page | None = asked.result() if asked in done else None
        return page

    def _take(self, page: Page) -> bool:
        """Pass reports on; return whether the worker has ended."""
        if page.begun != self._begun:
            if self._begun:
                self._lost()
            elif page.digest != self._digest:
                self._job.complain(
                    f"{self._name} runs with other settings: to change them, end the job first"
                )
            self._taken = page.first
        if not self._here:
            if self._begun:  # Ray has started it again, or reaches it again
                self._on_change(Restarted())
            self._here = True
            if self._ending:
                self._actor.end.remote()
        self._begun = page.begun
        if page.first > self._taken:
            missing = page.first - self._taken
            self._log.write(f"--- {missing} reports are missing: nobody read them\n".encode())
        self._taken = page.first + len(page.reports)
        for kind, value in page.reports:
            if kind == METRICS:
                self._metrics.write(value)
                event = event_in(value)
                if event is not None:
                    self._on_event(event)
            elif kind == LOG:
                self._log.write(value)
            elif kind == END:
                self._job.ray.kill(self._actor)  # all was read
                self._end(value)
                return True
            else:
                self._on_change(Restarting(*value) if kind == DEATH else Restarted())
        return False

    def _lost(self) -> None:
        """Note that Ray starts the actor again, or see to it that it does not."""
        if self._ending:
            self.kill()
        elif self._here:
            self._here = False
            self._on_change(Restarting(Death(1, 0.0, "", how=LOST), None))

    def _death_of_actor(self, text: str) -> Death:
        if not self._ending:
            return Death(WRONG_CONFIGURATION, 0.0, text, how="was ended by Ray")
        return Death(-signal.SIGKILL if self._here else 0, 0.0, "")

    def _end(self, death: Death) -> None:
        self._metrics.close()
        self._log.close()
        self._on_change(death)


def check_reachable(url: str, nodes: list[str], gcs: str = "") -> None:
    """Refuse a Redis that nodes of a cluster cannot reach, or that is none.

    Args:
        nodes: Addresses of the nodes; several virtual ones may share one.
        gcs: Host and port of Ray's own server; "": not known.

    Raises:
        ConfigError: The message says what to give instead.
    """
    found = parse_address(url or "embedded://")
    if found.scheme in ("embedded", "fake", "unix"):
        raise ConfigError(
            f"--on needs a Redis that all nodes reach, and {found.where} is on this machine: give "
            f"--url redis://HOST:6380/0 (or REDRB_URL), {_NOT_6379}."
        )
    options = found.options, *(each.options for each in found.sentinels)
    for host, port in [*found.nodes, *((each.get("host"), each.get("port")) for each in options)]:
        here = host in ("localhost", "127.0.0.1", "::1")
        if here and len(set(nodes)) > 1:
            raise ConfigError(
                f"--on needs a Redis that all nodes reach, and {host} is another machine on each "
                f"of them: give its name or address, {_NOT_6379}."
            )
        if f"{nodes[0] if here and nodes else host}:{port}" == gcs:
            raise ConfigError(
                f"{host}:{port} is Ray's own server (GCS), not Redis: let Redis listen on another "
                "port, such as 6380."
            )
