"""`JobGroups`: the groups of one job, from the prompts of its data set to its checkpoints."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from itertools import chain
from typing import Any, NamedTuple

from redrb.checks import checked_int
from redrb.compat.sample_groups.generation import Generation, acknowledge, release_all
from redrb.compat.sample_groups.packing import (
    check_size,
    forget_numbers,
    number,
    pack_group,
    unpack_group,
)
from redrb.compat.sample_groups.trained import TrainedFiles
from redrb.connection import connect
from redrb.connection.deadline import checked_timeout
from redrb.environment import PREFIX, variable
from redrb.errors import DecodeError, RecordError
from redrb.experience import BufferItem
from redrb.scopes import closed_on_error
from redrb.stream import ExperienceStream, Lease
from redrb.train.trainer import note_consumer, replace_predecessor

_log = logging.getLogger("redrb")

_FIRST_NUMBER = 1 << 40
"""First number of groups that are not of the data set, whose numbers are places in it."""

_SAVE_OPTIONS = ("save_interval", "release_train", "save_trigger_sentinel")
"""Options with which slime and miles write checkpoints."""

_SHARED_OPTIONS = ("lease_ms", "max_deliveries", "min_replicas")
"""Options of the stream of finished groups that hold for the two others as well."""


class TakenGroup(NamedTuple):
    """A group that was taken for training, its prompts if it has others, and its lease."""

    group: list[Any]
    prompts: list[Any]
    lease: Lease
    id: int


class JobGroups:
    """The groups of one job, as one process sees them; `job_groups` returns it.

    Attributes:
        rollout: Of miles: the rollout whose groups are taken now.
        has_source: Whether a data source of this process calls `save` and `load`.
    """

    def __init__(self, args: Any, framework: str) -> None:
        """Open the tasks that the arguments or the environment name."""
        self._framework = framework
        self._timeout = checked_timeout(getattr(args, "redrb_timeout", None))
        kept = getattr(args, "redrb_keep_checkpoints", None)
        kept = int(getattr(args, "async_save", None) or False) if kept is None else kept
        self._keep = checked_int("redrb_keep_checkpoints", kept)
        url, namespace, task = _names(args)
        options = dict(getattr(args, "redrb_stream", None) or {})
        self._shared = {name: options[name] for name in _SHARED_OPTIONS if name in options}
        self._files = TrainedFiles(args)
        with closed_on_error(connect(url)) as self._client:
            self.finished = ExperienceStream(
                self._client, task, namespace=namespace, checks=(), **options
            )
        self._checkpoints = getattr(args, "rollout_global_dataset", False) and any(
            getattr(args, name, None) for name in _SAVE_OPTIONS
        )
        self._held: dict[int, list[Lease]] = {}  # by rollout
        self._saved: list[int] = []
        self.rollout = 0
        self.has_source = False

    @cached_property
    def generation(self) -> Generation:
        """The groups that are not finished; makers that only put groups need no rights to them."""
        prompts, returned = (
            ExperienceStream(
                self._client,
                f"{self.finished.task}.{name}",
                namespace=self.finished.namespace,
                checks=(),
                tags=tags,
                **self._shared,
            )
            for name, tags in (("prompts", []), ("returned", ["of"]))
        )
        return Generation(prompts, returned, self.finished, lambda items: self._unpack(items)[0])

    def close(self) -> None:
        """Close the streams; their leased groups wait again."""
        with _jobs_lock:
            for names in [names for names, job in _jobs.items() if job is self]:
                del _jobs[names]
        self._client.close()

    # training

    def take(self, rollout_id: int, count: int, size: int) -> list[TakenGroup]:
        """Lease groups for a rollout; those without `size` trajectories become dead letters.

        Raises:
            BatchTimeout: Too few groups came in time; those that were taken wait again.
        """
        taken: list[TakenGroup] = []
        leases: list[Lease] = []
        try:
            while len(taken) < count:
                lease = self.finished.take(count - len(taken), timeout=self._timeout)
                leases.append(lease)
                for seq, items in zip(lease.ids, lease.groups(), strict=True):
                    try:
                        group, prompts = self._unpack(items)
                        check_size(group, size)
                    except (DecodeError, RecordError) as error:
                        _log.error("task %r: group %d: %s", self.finished.task, seq, error)
                        lease.reject(error, [seq])
                        continue
                    number(group, _FIRST_NUMBER + seq)
                    taken.append(TakenGroup(group, prompts, lease, seq))
        except BaseException:
            release_all(leases)
            raise
        self._held.setdefault(rollout_id, []).extend(leases)
        return taken

    def note(self, rollout_id: int) -> None:
        """Note which groups are trained up to a rollout, before the trainer gets the last of them.

        Without checkpoints they are acknowledged.
        """
        if not self._checkpoints:
            self._acknowledge_until(rollout_id)
            return
        trained: dict[str, dict[int, int]] = {}
        for lease in chain.from_iterable(self._held[key] for key in self._until(rollout_id)):
            samples = {seq: layout.samples for seq, layout in lease.layouts.items()}
            trained.setdefault(lease.incarnation, {}).update(samples)
        self._files.write(rollout_id, trained)

    def save(self, rollout_id: int) -> None:
        """Acknowledge what the checkpoint of a rollout has trained, which is on the disk.

        With `redrb_keep_checkpoints` it is what an earlier checkpoint has trained.
        """
        before = self._saved[-1] if self._saved else -1
        self._saved.append(rollout_id)
        if len(self._saved) > self._keep:
            self._acknowledge_until(self._saved[-1 - self._keep])
        self._files.delete(before + 1, rollout_id)
        self.generation.save()
        note_consumer(self._client, self.finished.task, self.finished)

    def load(self, rollout_id: int | None) -> None:
        """Resume after the checkpoint of a rollout: acknowledge its groups, release all others.

        Raises:
            DecodeError: The file that names its groups is damaged.
        """
        release_all(chain.from_iterable(self._held.values()))
        self._held.clear()
        self.generation.load()
        last = -1 if rollout_id is None else rollout_id
        self._saved, self.rollout = [last], last + 1
        for incarnation, groups in self._files.read(last).items() if last >= 0 else ():
            self.finished.settle(groups, incarnation=incarnation)
        replace_predecessor(self._client, self.finished.task, self.finished)
        self.finished.join_group()

    def _until(self, rollout_id: int) -> list[int]:
        return [key for key in self._held if key <= rollout_id]

    def _acknowledge_until(self, rollout_id: int) -> None:
        for key in self._until(rollout_id):
            for lease in self._held[key]:
                acknowledge(lease, self.finished)
            del self._held[key]

    def _unpack(self, items: Sequence[BufferItem]) -> tuple[list[Any], list[Any]]:
        return unpack_group(items, import_module(f"{self._framework}.utils.types").Sample)


_jobs: dict[tuple[str | None, ...], JobGroups] = {}
_jobs_lock = threading.RLock()


def job_groups(args: Any, framework: str) -> JobGroups:
    """Return the groups of the job that the arguments name: one object of a process for each."""
    key = (framework, *_names(args))
    with _jobs_lock:
        if key not in _jobs:
            _jobs[key] = JobGroups(args, framework)
        return _jobs[key]


def put_groups(
    framework: str, groups: Sequence[Sequence[Any]], args: Any, timeout: float | None
) -> None:
    """Store groups of a maker that has no data source; see `redrb.compat.slime.put_groups`."""
    packed = [forget_numbers(pack_group(group)) for group in groups]
    job_groups(args, framework).finished.put_many(packed, timeout=timeout)


def _names(args: Any) -> tuple[str | None, str, str]:
    """Return URL, namespace and task: of the arguments, or else of the environment."""

    def named(name: str) -> str | None:
        given: str | None = getattr(args, f"redrb_{name}", None)
        return variable(f"{PREFIX}{name.upper()}") if given is None else given

    return named("url"), named("namespace") or "default", named("task") or "rollouts"
