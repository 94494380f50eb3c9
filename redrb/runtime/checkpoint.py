"""Checkpoints of a trainer: one file, replaced in one step, that a later run goes on from.

A file holds the state of everything that was trained, of the random number generators, how far
`fit` had come, and the ids of the groups that were trained and not acknowledged yet: a resumed run
acknowledges these first, so that nothing is trained twice and nothing is lost. It is read with
`torch.load(weights_only=True)`: no code of it is run.
"""

from __future__ import annotations

import os
import pickle  # noqa: TID251 (the name of an error; nothing is unpickled by us)
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgpack
import numpy as np
import torch

from redrb.errors import ConfigError, DecodeError
from redrb.experience import Experience, Status
from redrb.experience.batching import METADATA
from redrb.experience.records import TENSOR_FIELDS, batch_size, per_sample

FORMAT = 1

# what torch.load raises for files that are something else, or cut off
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
    """What a checkpoint can hold: modules, optimizers, schedulers, and objects like them."""

    def state_dict(self) -> Any:
        """Return all that a resumed run needs."""

    def load_state_dict(self, state: Any) -> Any:
        """Take over what `state_dict` returned."""


@dataclass(slots=True)
class Position:
    """How far `fit` has come.

    Attributes:
        fit: Calls of `fit` that are over.
        episode: Episodes of this call that are over.
        epoch: Epochs of this episode that are over.
        batch: Batches of this epoch that are over.
        step: Batches that were ever trained on, all epochs.
        taken: Fresh batches that were ever taken.
        order: In a reshuffled epoch: the order of the kept batches.
        kept: The batches of this episode, where later epochs need them.
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
        """Return how many fresh batches this call has taken, at so many an episode."""
        of_episode = self.batch if self.epoch == 0 else update_steps
        return self.episode * update_steps + of_episode


@dataclass(frozen=True, slots=True)
class Mark:
    """Groups that the checkpoint has trained and that were not acknowledged when it was written.

    Attributes:
        ids: Their ids.
        samples: Samples in each.
    """

    ids: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()

    def as_mapping(self) -> dict[int, int]:
        """Return samples by id."""
        return dict(zip(self.ids, self.samples, strict=True))


def stateful_parts(owner: object) -> dict[str, Stateful]:
    """Return what has a state of an object's attributes, and in lists and dicts there, by name."""
    found: dict[str, Stateful] = {}
    for name, value in vars(owner).items():
        inside: list[tuple[str, Any]] = [(name, value)]
        if isinstance(value, dict):
            inside = [(f"{name}.{key}", part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            inside = [(f"{name}.{place}", part) for place, part in enumerate(value)]
        found.update({at: part for at, part in inside if isinstance(part, Stateful)})
    return found


class Checkpoints:
    """The checkpoints in one directory: files named by step, of which the newest stay."""

    def __init__(self, directory: Path, *, owner: str, keep: int = 1) -> None:
        """Use a directory; it is made when the first checkpoint is written.

        Args:
            directory: Where the files are.
            owner: Whose they are: those of another are refused.
            keep: How many stay.
        """
        self._directory = directory
        self._owner = owner
        self._keep = keep

    def steps(self) -> list[int]:
        """Return the steps of which there are checkpoints, the newest last."""
        found = (_NAME.fullmatch(path.name) for path in self._directory.glob("checkpoint-*.pt"))
        return sorted(int(name[1]) for name in found if name)

    def save(self, parts: Mapping[str, Stateful], position: Position, mark: Mark) -> None:
        """Write a checkpoint; a crash leaves the one before or the new one, whole.

        Raises:
            ConfigError: The file cannot be written.
        """
        told = {item.name: getattr(position, item.name) for item in fields(position)}
        told["kept"] = [_packed(batch) for batch in position.kept]
        content = {
            "format": FORMAT,
            "owner": self._owner,
            "parts": {name: part.state_dict() for name, part in parts.items()},
            "random": _random_state(),
            "position": told,
            "mark": {"ids": list(mark.ids), "samples": list(mark.samples)},
        }
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            part_file = self._directory / "checkpoint.part"
            with part_file.open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            part_file.replace(self._path(position.step))
            _sync_directory(self._directory)
            for step in self.steps()[: -self._keep]:
                self._path(step).unlink()
        except OSError as error:
            raise ConfigError(
                f"no checkpoint can be written to {self._directory}: {error}."
            ) from error

    def load(self, step: int, parts: Mapping[str, Stateful]) -> tuple[Position, Mark]:
        """Load a checkpoint into `parts` and the random number generators.

        Raises:
            DecodeError: The file is damaged, or of a newer format; nothing was loaded.
            ConfigError: It is another trainer's, or holds other parts; nothing was loaded. Or a
                part does not take its state over: then those before it are loaded.
        """
        path = self._path(step)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if content["format"] != FORMAT:
                raise DecodeError(
                    f"{path} has format {content['format']}, this redrb reads {FORMAT}."
                )
            owner = content["owner"]
            told = dict(content["position"])
            told["kept"] = [_unpacked(group) for group in told["kept"]]
            position = Position(**told)
            mark = Mark(tuple(content["mark"]["ids"]), tuple(content["mark"]["samples"]))
            states, generators = content["parts"], content["random"]
        except DecodeError:
            raise
        except _DAMAGED as error:
            raise DecodeError(f"{path} is not a checkpoint of redrb: {error}") from error
        if owner != self._owner:
            raise ConfigError(
                f"{path} is of {owner}, this is {self._owner}: give each trainer a "
                "checkpoint_dir of its own."
            )
        if states.keys() != parts.keys():
            raise ConfigError(
                f"{path} holds {sorted(states)}, this trainer has {sorted(parts)}: resume with the "
                "same trainer, or use another checkpoint directory."
            )
        for name, part in parts.items():
            try:
                part.load_state_dict(states[name])
            except (RuntimeError, ValueError, LookupError) as error:
                raise ConfigError(
                    f"{path}: {name} does not fit this trainer, which is loaded in part now and "
                    f"must not be used: {error}"
                ) from error
        _restore_random_state(generators)
        return position, mark

    def forget_after(self, step: int) -> None:
        """Delete the checkpoints of later steps: the run goes on from this one."""
        for later in self.steps():
            if later > step:
                self._path(later).unlink()

    def _path(self, step: int) -> Path:
        return self._directory / f"checkpoint-{step}.pt"


def _sync_directory(directory: Path) -> None:
    folder = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _packed(batch: Experience) -> dict[str, Any]:
    """Return a batch as it is, in what a file may hold: tensors, text and numbers."""
    size = batch_size(batch)
    meta = {name: per_sample(batch, name, size) for name in METADATA}
    packed = msgpack.packb(meta, default=str)
    return {
        "tensors": {name: getattr(batch, name) for name in TENSOR_FIELDS},
        "further": dict(batch.tensors),
        "side": batch.padding_side,
        "meta": torch.frombuffer(bytearray(packed), dtype=torch.uint8),
    }


def _unpacked(packed: Mapping[str, Any]) -> Experience:
    meta = msgpack.unpackb(packed["meta"].numpy().tobytes())
    meta["status"] = [Status(status) for status in meta["status"]]
    return Experience(
        **packed["tensors"], tensors=packed["further"], padding_side=packed["side"], **meta
    )


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": (version, list(numbers), gauss),
        "numpy": (str(name), torch.tensor(np.asarray(keys, np.int64)), place, has_gauss, cached),
    }


def _restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, cached))
