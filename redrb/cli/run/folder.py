"""The folder of a run: metrics, logs, checkpoints, and the data of its server."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redrb.connection.embedded import delete_data
from redrb.errors import ConfigError

WORKERS_END_S = 60.0
"""Longest wait for the workers of an earlier run that was killed."""

_RECORDS = ("trainer.jsonl", "trainer.log", "maker-*.jsonl", "maker-*.log", "run.jsonl")
"""What runs write down in the folder."""


@dataclass(frozen=True)
class Owner:
    """The job that a folder belongs to; of a `demo` a folder keeps only records."""

    recipe: str
    file: str
    demo: bool = False

    def __str__(self) -> str:
        return "redrb demo" if self.demo else f"the recipe {self.recipe} ({self.file})"

    def is_same(self, other: Owner) -> bool:
        """Return whether `other` is this job; a file that is gone was moved or renamed."""
        if (self.recipe, self.demo) != (other.recipe, other.demo):
            return False
        return self.file == other.file or not Path(self.file).exists()


class RunFolder:
    """The folder of a run; the next run of the same job goes on in it.

    Attributes:
        workers_lock: In `used`, the descriptor of a locked file that the server and the workers
            inherit: the next run waits until all of them have ended. None before.
        redis: Folder for the data of the run's own server.
        checkpoints: Folder for checkpoints, unless the recipe names another one.
        diary: Events of the run itself: its begin, deaths of its processes, its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.workers_lock: int | None = None
        self.redis = (path / "redis").absolute()
        self.checkpoints = path / "checkpoints"
        self.diary = path / "run.jsonl"

    def metrics(self, worker: str) -> Path:
        """Return the file for the events of a worker."""
        return self.path / f"{worker}.jsonl"

    def log(self, worker: str) -> Path:
        """Return the file for the other output of a worker."""
        return self.path / f"{worker}.log"

    @contextmanager
    def used(self) -> Iterator[None]:
        """Make the folder, and keep other runs out of it in this block.

        It waits for server and workers of an earlier run that was killed: they end with their run,
        though not in the middle of a system call.

        Raises:
            ConfigError: It cannot be made, another run uses it, or processes of an earlier run
                do not end.
        """
        with self._opened("run.lock") as run, self._opened("workers.lock") as workers:
            if not _lock(run, 0.0):
                raise ConfigError(
                    f"another run uses the folder {self.path}: end it, or choose another --out."
                )
            if not _lock(workers, WORKERS_END_S):
                raise ConfigError(
                    f"processes of an earlier run in {self.path}, which was killed, have not ended "
                    f"for {WORKERS_END_S:g} s: end them (`fuser {self.path}/workers.lock` names "
                    "them), or choose another --out."
                )
            self.workers_lock = workers
            yield
            self.workers_lock = None

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path / name, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"--out {self.path} cannot be made: {error.strerror}.") from error
        try:
            yield file
        finally:
            os.close(file)

    def check_owner(self, owner: Owner) -> str:
        """Refuse a folder that belongs to another job; return what to say of a recipe that moved.

        Raises:
            ConfigError: Earlier runs in it were of another job.
        """
        before = self._owner()
        if before is None or before == owner:
            return ""
        if before.is_same(owner):
            return (
                f"{self.path} was made by {before.file}, which is gone, and this is {owner.file}: "
                "if it is another job, end this run, and give --out and --task, or --fresh"
            )
        fresh = "" if owner.demo else ", or delete what the other job has made in it with --fresh"
        raise ConfigError(
            f"the folder {self.path} belongs to {before}, and this is {owner}: choose another "
            f"folder with --out{fresh}."
        )

    def _owner(self) -> Owner | None:
        """Return the job of the newest run in this folder; None if it is not known."""
        for event in reversed([each for each in _events(self.diary) if each["event"] == "began"]):
            if "recipe" in event and "file" in event:
                return Owner(event["recipe"], event["file"], bool(event.get("demo")))
        return None

    def clear_state(self) -> None:
        """Delete checkpoints and servers' data; raises ConfigError if one is in use."""
        if self.redis.exists():
            delete_data(self.redis)
        if self.checkpoints.exists():
            shutil.rmtree(self.checkpoints)

    def clear_records(self) -> None:
        """Delete metrics and logs of earlier runs, and nothing else."""
        for pattern in _RECORDS:
            for found in self.path.glob(pattern):
                found.unlink()

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of earlier runs; torn lines of killed processes are left out."""
        files = [self.diary, self.metrics("trainer"), *sorted(self.path.glob("maker-*.jsonl"))]
        for file in files:
            yield from _events(file)


def _lock(file: int, seconds: float) -> bool:
    """Lock a file in `seconds`; False: another process has it. Raises ConfigError without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not seconds:
            return False
    except OSError as error:
        raise ConfigError(f"files in --out cannot be locked: {error.strerror}.") from error
    else:
        return True
    locked = threading.Event()

    def wait() -> None:
        fcntl.flock(file, fcntl.LOCK_EX)
        locked.set()

    threading.Thread(target=wait, daemon=True).start()
    return locked.wait(seconds)


def _events(file: Path) -> Iterator[dict[str, Any]]:
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                yield event
