"""Files beside the checkpoints: which groups each has trained and not acknowledged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from redrb.errors import DecodeError
from redrb.staging import replacing

_log = logging.getLogger("redrb")


class TrainedGroups(msgspec.Struct):
    """The content of a file: the samples of each group, by the task's incarnation and by id."""

    trained: dict[str, dict[int, int]]
    format: int = 1


class TrainedFiles:
    """The files of one job, in the folder `rollout` of its checkpoints.

    A file is written before its rollout is trained, so that a trainer that dies after it has saved
    its model, and before it has acknowledged, still knows which groups this model has trained.
    """

    def __init__(self, args: Any) -> None:
        self._written, self._read = (
            None if getattr(args, name, None) is None else Path(getattr(args, name), "rollout")
            for name in ("save", "load")
        )

    def write(self, rollout_id: int, trained: dict[str, dict[int, int]]) -> None:
        """Write the file of a rollout; a crash leaves none or all of it."""
        if self._written is None:
            return
        self._written.mkdir(parents=True, exist_ok=True)
        with replacing(_path(self._written, rollout_id)) as file:
            file.write(msgspec.json.encode(TrainedGroups(trained)))

    def read(self, rollout_id: int) -> dict[str, dict[int, int]]:
        """Return the groups of a checkpoint; none if it has no file.

        Raises:
            DecodeError: The file is damaged.
        """
        if self._read is None:
            return {}
        path = _path(self._read, rollout_id)
        try:
            return msgspec.json.decode(path.read_bytes(), type=TrainedGroups).trained
        except FileNotFoundError:
            _log.warning("%s does not exist: no group of this checkpoint is acknowledged", path)
            return {}
        except msgspec.DecodeError as error:
            raise DecodeError(
                f"{path} is damaged ({error}): resume from an older checkpoint. Without the file "
                "the groups that this checkpoint has trained last are trained again."
            ) from error

    def delete(self, first: int, end: int) -> None:
        """Delete the files of rollouts without a checkpoint, from `first` to before `end`."""
        if self._written is not None:
            for rollout_id in range(first, end):
                _path(self._written, rollout_id).unlink(missing_ok=True)


def _path(folder: Path, rollout_id: int) -> Path:
    return folder / f"redrb_groups_{rollout_id}.json"
