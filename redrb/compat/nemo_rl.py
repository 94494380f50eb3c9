"""`RedrbDataPlaneClient`: NeMo RL's data plane on tables (docs/how-to/nemo-rl.md)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nemo_rl.data_plane.interfaces import (  # type: ignore[import-not-found]
    DataPlaneClient,
    KVBatchMeta,
)
from tensordict import NonTensorData, TensorDict

from redrb import environment
from redrb.compat.transfer_queue.checkpoint import load, save
from redrb.compat.transfer_queue.queue import Queue
from redrb.compat.transfer_queue.values import to_columns, to_tensordict
from redrb.connection import connect
from redrb.errors import (
    BatchTimeout,
    ConfigError,
    EncodeError,
    LeaseLost,
    MissingRows,
    StaleRun,
)
from redrb.scopes import closed_on_error
from redrb.stream.take.hand_back import hand_back
from redrb.table import Claim

_log = logging.getLogger("redrb")


class MissingSamples(MissingRows, KeyError):
    """A partition has no samples of these ids, or they lack fields; a KeyError for NeMo RL."""


class UnknownConsumer(ConfigError, KeyError):
    """A task claims samples that was not registered for the partition; a KeyError for NeMo RL."""

    def __str__(self) -> str:  # that of a KeyError is quoted
        return str(self.args[0])


class NonTensorLeaf(EncodeError, TypeError):
    """A field has one Python object for the whole batch; a TypeError for NeMo RL."""


class RedrbDataPlaneClient(DataPlaneClient):  # type: ignore[misc]
    """NeMo RL's data plane: each partition is a table, and each consumer task claims its rows.

    A claim is leased to this process. It is acknowledged when the same task claims again through
    this client, in whichever thread, and in `close`; so the claims of a process that dies are
    claimed by others. Cleared samples need no acknowledgement.

    Args:
        cfg: NeMo RL's settings of its data plane; none has a meaning here.
        bootstrap: Begin a run, in the driver: writers of earlier runs are refused, and their
            samples are cleared, until `load_checkpoint` brings them back. Workers join the run.
        url: URL of Redis; default: REDRB_URL.
        namespace: Default: REDRB_NAMESPACE, or "default".

    Raises:
        ConfigError: There is no URL, or no driver has begun a run there.
        StoreUnavailable: No server answers.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,  # noqa: ARG002
        *,
        bootstrap: bool = True,
        url: str | None = None,
        namespace: str | None = None,
    ) -> None:
        namespace = namespace or environment.variable("REDRB_NAMESPACE") or "default"
        self._claims: dict[tuple[str, str], list[Claim]] = {}
        self._lock = threading.Lock()
        self._closed = False
        with closed_on_error(connect(url)) as client:
            self._queue = Queue(client, namespace, environment.variable("REDRB_SECRET"))
            if bootstrap:
                self._queue.begin()
            elif not self._queue.join():
                raise ConfigError(
                    f"no run has begun at {self._queue.where}: build the driver's client first, "
                    "and set the same REDRB_URL and REDRB_NAMESPACE in the environment of every "
                    "process."
                )

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],  # noqa: ARG002
        num_samples: int,  # noqa: ARG002
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,  # noqa: ARG002
        enums: dict[str, list[str]] | None = None,  # noqa: ARG002
    ) -> None:
        """Make a partition, and name the tasks that claim its samples, in any process."""
        self._queue.declare(partition_id, consumer_tasks)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,  # noqa: ARG002
        blocking: bool = True,  # noqa: FBT001
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """Claim samples that have all fields and that the task has not claimed.

        Args:
            required_fields: The same in each call of a task.
            batch_size: Samples; without `blocking` as many of them as there are, perhaps none.
            timeout_s: Seconds to wait for the whole batch.

        Raises:
            BatchTimeout: Fewer samples were there in time (a TimeoutError).
            UnknownConsumer: The partition was not registered with this task (a KeyError).
        """
        partition = self._queue.known(partition_id)
        tasks = self._queue.tasks(partition_id)
        if partition is None or tasks is None or task_name not in tasks:
            listed = ", ".join(map(repr, tasks or [])) or "none"
            raise UnknownConsumer(
                f"task {task_name!r} is not registered as a consumer of partition "
                f"{partition_id!r}; its tasks are {listed}. Name it in register_partition."
            )
        self._acknowledge(partition_id, task_name)
        try:
            claim = partition.table.claim(
                task_name,
                required_fields,
                batch_size,
                at_least=None if blocking else 1,
                timeout=timeout_s if blocking else 0,
            )
        except BatchTimeout:
            if blocking:
                raise
            return self._meta(partition_id, task_name, (), required_fields, [])
        try:
            tags, _ = partition.tags_and_columns(claim.keys)
        except BaseException:  # nobody sees these samples: the next claim may not acknowledge them
            hand_back(claim.lease)
            raise
        with self._lock:
            self._claims.setdefault((partition_id, task_name), []).append(claim)
        return self._meta(partition_id, task_name, claim.keys, required_fields, tags)

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        """Return fields of the samples of a batch: `select_fields`, or those that it names."""
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise ConfigError("get_data: give select_fields, or a batch with meta.fields.")
        return self.get_samples(meta.sample_ids, meta.partition_id, list(fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """Return whether each task has claimed all samples of a partition, in any process."""
        partition = self._queue.known(partition_id)
        if partition is None:
            return False
        stats = partition.table.stats()
        rows, claims = stats.counts.rows, stats.counts.claims
        return not rows or all(
            task in claims and claims[task].consumed + stats.tasks[task].ledger.leased >= rows
            for task in task_names
        )

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Add fields to samples and merge tags; samples that are missing are made.

        Raises:
            NonTensorLeaf: A field has one Python object for the whole batch.
            EncodeError: A value cannot be stored; the message names field, sample and type.
            StaleRun: A newer run has begun: this process belongs to an earlier one.
        """
        columns: dict[str, Any] = {}
        if fields is not None:
            for name in fields.keys():  # noqa: SIM118 (not those of a dict)
                leaf = fields.get(name)
                if isinstance(leaf, NonTensorData) and not isinstance(
                    leaf.data, torch.Tensor | np.ndarray | list
                ):
                    raise NonTensorLeaf(
                        f"field {name!r} is a non-tensor leaf for the whole batch: give a tensor, "
                        "or an array or a NonTensorStack with a value for each sample; or use tags."
                    )
            columns = to_columns(fields.detach(), None, pickles=self._queue.secret is not None)
        given = [{} for _ in sample_ids] if tags is None else [dict(each) for each in tags]
        if sample_ids:
            self._queue.partition(partition_id).put(sample_ids, columns, given)
        meta = self._meta(partition_id, None, sample_ids, list(columns) or None, given)
        meta.sequence_lengths = None
        return meta

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        """Return fields of samples, in the order of their ids.

        As NeMo RL's clients do: tensors of one shape become a dense tensor, ragged ones a nested
        tensor, and other values a NonTensorStack.

        Raises:
            MissingSamples: A sample is not there, or lacks a field (a KeyError).
        """
        if not sample_ids:
            return TensorDict({}, batch_size=(0,))
        partition = self._queue.known(partition_id)
        if partition is None:
            raise MissingSamples(partition_id, tuple(sample_ids))
        try:
            rows = partition.table.get(sample_ids, select_fields)
        except MissingRows as error:
            raise MissingSamples(error.table, error.keys, error.columns) from error
        return to_tensordict(rows, uniform=torch.strided)

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """Remove samples; None: all of the partition, whichever process has put them."""
        partition = self._queue.known(partition_id)
        if partition is not None:
            partition.table.clear(sample_ids)

    def save_checkpoint(self, checkpoint_dir: str | Path) -> None:
        """Mark this moment in Redis, and write a small file that names the mark.

        Batches that were claimed through this client are acknowledged first: they are trained, and
        do not come again after `load_checkpoint`. Those that another client has claimed last do,
        unless it has claimed again or was closed.
        """
        for partition_id, task in list(self._claims):
            self._acknowledge(partition_id, task)
        save(self._queue, checkpoint_dir)

    def load_checkpoint(self, checkpoint_dir: str | Path) -> None:
        """Return to a checkpoint, in the driver: samples that were cleared after it come back.

        Samples that were put after it stay. Redis keeps the newest two checkpoints.
        """
        load(self._queue, checkpoint_dir, "keep")

    def close(self) -> None:
        """Acknowledge the claims of this client, and close its connection.

        Where a newer run has begun, they wait for its workers instead.
        """
        if self._closed:
            return
        self._closed = True
        for partition_id, task in list(self._claims):
            try:
                self._acknowledge(partition_id, task)
            except StaleRun as error:
                _log.warning("%s", error)
        self._queue.client.close()

    def _acknowledge(self, partition_id: str, task: str) -> None:
        """Acknowledge what a task has claimed before through this client, in all threads."""
        with self._lock:
            claims = self._claims.pop((partition_id, task), [])
        try:
            while claims:
                try:
                    claims[0].ack()
                except LeaseLost as error:
                    _log.warning("task %s: another process claims a batch, too: %s", task, error)
                del claims[0]
        finally:  # Redis stayed away: the next call acknowledges those that are left
            with self._lock:
                self._claims.setdefault((partition_id, task), []).extend(claims)

    def _meta(
        self,
        partition_id: str,
        task: str | None,
        sample_ids: Sequence[str],
        fields: Sequence[str] | None,
        tags: list[dict[str, Any]],
    ) -> KVBatchMeta:
        known = any("input_lengths" in each for each in tags)
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=task,
            sample_ids=list(sample_ids),
            fields=None if fields is None else list(fields),
            sequence_lengths=[int(each.get("input_lengths", 0)) for each in tags]
            if known
            else None,
            tags=tags or None,
        )
