"""Checkpoints of a trainer: one file each, replaced in one step, from which a later run resumes.

A file holds the state of all modules and optimizers, of the random number generators, how far
`fit` had come, and the ids of groups that were trained and not acknowledged yet. A resumed run
acknowledges these groups first, so that nothing is trained twice and nothing is lost. Files are
read with `torch.load(weights_only=True)`: no code in them is run.
"""

from __future__ import annotations

import copy
import pickle  # noqa: TID251 (the name of an error; nothing is unpickled by us)
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Protocol, Self, TypeAlias, runtime_checkable

import msgpack
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from redrb.errors import CheckpointFailed, ConfigError, DecodeError
from redrb.experience import Experience, Status
from redrb.experience.batching import METADATA
from redrb.experience.records import TENSOR_FIELDS, batch_size, per_sample
from redrb.staging import check_writable, may_pass, replacing
from redrb.train.world import rank_here, world_size_here
from redrb.unpacking import MAX_CONTAINERS, MAX_NESTING, unpack


def random_state() -> dict[str, Any]:
    """Return the state of all generators, in types that `torch.load(weights_only=True)` reads."""
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (str(name), torch.tensor(np.asarray(keys, np.int64)), place, has_gauss, cached),
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set all generators to a state that `random_state` returned.

    The state of CUDA is ignored if this machine has another number of GPUs.
    """
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, cached))


FORMAT = 5

Unacked: TypeAlias = dict[str, dict[int, int]]
"""Groups that were trained and not acknowledged yet: incarnation of the task -> id -> samples."""

# errors of torch.load for files that are cut off or of another kind
_DAMAGED = (
    OSError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
    pickle.UnpicklingError,
)
_NAME = re.compile(r"checkpoint-(\d{1,18})\.pt")


@runtime_checkable
class Stateful(Protocol):
    """An object whose state a checkpoint holds: a module, optimizer, scheduler or the like."""

    def state_dict(self) -> Any:
        """Return all that a resumed run needs."""

    def load_state_dict(self, state: Any) -> Any:
        """Load a state that `state_dict` returned."""


@dataclass(slots=True)
class Position:
    """How far `fit` has come.

    Attributes:
        fit: Finished calls of `fit`.
        episode: Finished episodes of this call.
        epoch: Finished epochs of this episode.
        batch: Finished batches of this epoch.
        step: Training steps of all calls and epochs.
        taken: Fresh batches of all calls.
        order: In an epoch over kept batches: the order of these batches.
        kept: The batches of this episode, if later epochs need them.
    """

    fit: int = 0
    episode: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    taken: int = 0
    order: list[int] = field(default_factory=list)
    kept: list[Experience] = field(default_factory=list)

    def fresh(self, update_steps: int) -> int:
        """Return how many fresh batches this call has trained, `update_steps` an episode."""
        of_episode = self.batch if self.epoch == 0 else update_steps
        return self.episode * update_steps + of_episode


def stateful_parts(owner: object) -> dict[str, Stateful]:
    """Return the `Stateful` attributes of an object by name, also from lists and dicts."""
    found: dict[str, Stateful] = {}
    for name, value in vars(owner).items():
        inside: list[tuple[str, Any]] = [(name, value)]
        if isinstance(value, dict):
            inside = [(f"{name}.{key}", part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            inside = [(f"{name}.{index}", part) for index, part in enumerate(value)]
        found.update({at: part for at, part in inside if isinstance(part, Stateful)})
    return found


def _classes(parts: Mapping[str, Stateful]) -> dict[str, str]:
    """Return the classes of all parts but modules, which check the names in their states."""
    return {
        name: type(part).__name__ for name, part in parts.items() if not isinstance(part, nn.Module)
    }


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints in one directory: files named by step, of which the newest are kept.

    The directory is made when the first checkpoint is written, or checked.
    """

    directory: Path
    owner: str
    keep: int = 1

    @classmethod
    def of_rank(cls, directory: str | Path, owner: str, rank: int | None) -> Self:
        """Return the checkpoints of a trainer; each rank of several has a directory in this one."""
        if rank is None and world_size_here() == 1:
            return cls(Path(directory), owner)
        # two are kept: ranks resume from the newest step of which all of them have a checkpoint
        number = rank_here() if rank is None else rank
        return cls(Path(directory) / f"rank-{number}", owner, keep=2)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, the newest last."""
        found = (_NAME.fullmatch(path.name) for path in self.directory.glob("checkpoint-*.pt"))
        return sorted(int(name[1]) for name in found if name)

    def check(self) -> None:
        """Find out before any work whether checkpoints can be written; raises as `save` does."""
        with self._writing():
            check_writable(self.directory, "checkpoint")

    def save(self, parts: Mapping[str, Stateful], position: Position, unacked: Unacked) -> None:
        """Write a checkpoint; a crash leaves either the previous one or the new one, complete.

        Raises:
            CheckpointFailed: The disk is full, read-only or failing; nothing of the file is left.
            ConfigError: The directory cannot be used.
        """
        stored = {each.name: getattr(position, each.name) for each in fields(position)}
        stored["kept"] = [_packed(batch) for batch in position.kept]
        content = {
            "format": FORMAT,
            "owner": self.owner,
            "parts": {name: part.state_dict() for name, part in parts.items()},
            "classes": _classes(parts),
            "random": random_state(),
            "position": stored,
            "unacked": unacked,
        }
        with self._writing():
            self._write(position.step, content)

    def load(self, step: int, parts: Mapping[str, Stateful]) -> tuple[Position, Unacked]:
        """Load a checkpoint into `parts` and the random number generators.

        Returns:
            The position, and the `unacked` groups that `save` was given.

        Raises:
            DecodeError: The file is damaged, or of a newer format; nothing was loaded.
            ConfigError: The checkpoint is another trainer's, or holds other parts; nothing was
                loaded. Or one part refuses its state; the parts before it are loaded then.
        """
        path = self._path(step)
        content, position, unacked = _read(path)
        if content["owner"] != self.owner:
            raise ConfigError(
                f"{path} is of {content['owner']}, and this is {self.owner}: give each trainer a "
                "separate checkpoint_dir."
            )
        states = content["parts"]
        if states.keys() != parts.keys():
            raise ConfigError(
                f"{path} holds {sorted(states)}, this trainer has {sorted(parts)}: resume with the "
                "same trainer, or use another checkpoint directory."
            )
        for name, kind in _classes(parts).items():
            if content["classes"].get(name) != kind:
                raise ConfigError(
                    f"{path} holds {name} of {content['classes'].get(name)}, and this trainer has "
                    f"{kind}, which cannot go on from that state: resume with the same class, or "
                    "use another checkpoint directory."
                )
        for name, part in parts.items():
            try:
                part.load_state_dict(states[name])
            except (RuntimeError, ValueError, LookupError) as error:
                raise ConfigError(
                    f"{path}: {name} does not fit this trainer, which is loaded in part now and "
                    "must not be used: resume with the same models, sharded or not as before, or "
                    f"use another checkpoint directory: {error}"
                ) from error
        restore_random_state(content["random"])
        return position, unacked

    def forget_after(self, step: int) -> None:
        """Delete the checkpoints of later steps: training goes on from this one."""
        with self._writing():
            for later in self.steps():
                if later > step:
                    self._path(later).unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"no checkpoint can be written to {self.directory}: {error}"
            if may_pass(error):
                steps = self.steps()
                begins = f"goes on from {self._path(steps[-1])}" if steps else "begins anew"
                raise CheckpointFailed(
                    f"{text}. Make room on the disk, or make it writable; a trainer that starts "
                    f"again {begins}."
                ) from error
            raise ConfigError(f"{text}. Give another directory.") from error

    def _write(self, step: int, content: Mapping[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with replacing(self._path(step), staged=self.directory / "checkpoint") as file:
            _save(content, file)
        for old in self.steps()[: -self.keep]:
            self._path(old).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.directory / f"checkpoint-{step}.pt"


def _save(content: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write a checkpoint to a file; torch hides an error of the disk behind a RuntimeError."""
    try:
        torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _read(path: Path) -> tuple[dict[str, Any], Position, Unacked]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != FORMAT:
            raise DecodeError(f"{path} has format {content['format']}, this redrb reads {FORMAT}.")
        stored = dict(content["position"])
        stored["kept"] = [_unpacked(batch, path) for batch in stored["kept"]]
        position = Position(**stored)
        unacked = {str(name): dict(groups) for name, groups in content["unacked"].items()}
        if not {"owner", "parts", "classes", "random"} <= content.keys():
            raise DecodeError(f"{path} is not a checkpoint of redrb: it lacks a part.")
    except DecodeError:
        raise
    except _DAMAGED as error:
        raise DecodeError(f"{path} is not a checkpoint of redrb: {error}") from error
    return content, position, unacked


def _packed(batch: Experience) -> dict[str, Any]:
    """Return a batch with its padding, in types that `torch.load(weights_only=True)` reads."""
    size = batch_size(batch)
    meta = {name: per_sample(batch, name, size) for name in METADATA}
    packed = msgpack.packb(meta, datetime=True, default=str)
    return {
        "tensors": {name: getattr(batch, name) for name in TENSOR_FIELDS},
        "further": dict(batch.tensors),
        "side": batch.padding_side,
        "group_index": batch.group_index,
        "meta": torch.frombuffer(bytearray(packed), dtype=torch.uint8),
    }


def _unpacked(packed: Mapping[str, Any], path: Path) -> Experience:
    size = len(packed["tensors"]["sequences"])
    meta = unpack(
        packed["meta"].numpy().tobytes(),
        f"metadata of a batch in {path}",
        levels=MAX_NESTING + 1,  # a group's extras may have MAX_NESTING, and stand in a map here
        containers=MAX_CONTAINERS * (size + 1),  # of each sample, and those around them
    )
    meta["status"] = [Status(status) for status in meta["status"]]
    return Experience(
        **packed["tensors"],
        tensors=packed["further"],
        padding_side=packed["side"],
        group_index=packed.get("group_index"),
        **meta,
    )


Groups: TypeAlias = list[dict[str, Any]]
"""Settings of each parameter group of an optimizer, such as `lr`."""

_PARAMETERS = ("params", "param_names")


class DeclaredSettings:
    """The settings with which a program has made its optimizers, as a part of a checkpoint.

    The state of an optimizer in a checkpoint has its settings, and loading it brings them back.
    Settings that are declared otherwise than before, as with another `--learning-rate`, are set
    after that. The others keep the values of the checkpoint, which a schedule may have changed.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Note the settings of new optimizers."""
        self._optimizers = optimizers
        self._now = {
            name: [
                {key: copy.copy(group[key]) for key in group.keys() - set(_PARAMETERS)}
                for group in optimizer.param_groups
            ]
            for name, optimizer in optimizers.items()
        }

    def state_dict(self) -> dict[str, Groups]:
        """Return the settings as they were declared."""
        return self._now

    def load_state_dict(self, state: Mapping[str, Groups]) -> None:
        """Set the settings that differ from those in `state`; the optimizers are loaded before."""
        for name, optimizer in self._optimizers.items():
            for group, now, before in zip(
                optimizer.param_groups, self._now[name], state[name], strict=True
            ):
                group |= {key: value for key, value in now.items() if value != before.get(key)}
