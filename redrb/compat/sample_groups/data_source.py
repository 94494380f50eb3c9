"""`GroupDataSource`: the data source of slime and miles, whose groups and place lie in Redis."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

from redrb.compat.sample_groups.job import job_groups
from redrb.compat.sample_groups.packing import pack_group
from redrb.errors import ConfigError


class GroupDataSource:
    """Base of the data sources; `framework` is the package whose data set is read."""

    framework: ClassVar[str]

    def __init__(self, args: Any) -> None:
        """Open the data set and the tasks that `args` name.

        Raises:
            ConfigError: There is a `--buffer-filter-path`, or no URL of Redis.
        """
        if getattr(args, "buffer_filter_path", None) is not None:
            raise ConfigError(
                "--buffer-filter-path chooses among groups in the memory of the trainer, and these "
                "are in Redis, oldest first: leave it out, or use the framework's data source."
            )
        self.args = args
        self.groups = job_groups(args, self.framework)
        self.groups.has_source = True
        module = import_module(f"{self.framework}.rollout.data_source")
        self._prompts = module.RolloutDataSource(args)
        self._lock = threading.Lock()

    @property
    def dataset(self) -> Any:
        """The framework's data set; None if there is none."""
        return self._prompts.dataset

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Return groups to generate: returned ones first, then the next prompts of the data set."""
        return self.groups.generation.hand_out(num_samples, self._prompt)

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Store aborted and surplus groups, which `get_samples` returns again."""
        self.groups.generation.give_back(samples)

    def put(self, groups: Sequence[Sequence[Any]], *, timeout: float | None = None) -> None:
        """Store finished groups for the trainer; those of `get_samples` exactly once.

        Args:
            timeout: Seconds to wait for room; None waits for ever.

        Raises:
            RecordError: A field of a sample cannot be stored; nothing was stored.
            StoreFull: There was no room in time.
            StoreUnavailable: Redis stayed away.
        """
        packed = [(group, pack_group(group)) for group in groups]
        self.groups.generation.finish(packed, timeout)

    def drop(self, groups: Sequence[Sequence[Any]]) -> None:
        """End groups of `get_samples` that are not to be trained; they count as filtered."""
        for group in groups:
            self.groups.generation.drop(group)

    def save(self, rollout_id: int) -> None:
        """Acknowledge the groups that the checkpoint of a rollout has trained."""
        self.groups.save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Go on after the checkpoint of a rollout: groups that it has not trained wait again."""
        self.groups.load(rollout_id)

    def close(self) -> None:
        """Close the connections; leased groups wait again."""
        self.groups.close()

    def get_buffer_length(self) -> int:
        """Return how many aborted and surplus groups wait."""
        return self.groups.generation.returned.count()

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def _prompt(self, place: int) -> list[Any]:
        """Return the group of a place, counted over all epochs, as the framework makes it."""
        source = self._prompts
        with self._lock:
            if source.dataset is not None:
                source.epoch_id, source.sample_offset = divmod(place, len(source.dataset))
                if self.args.rollout_shuffle:
                    source.dataset.shuffle(source.epoch_id)
            source.sample_group_index = place
            source.sample_index = place * self.args.n_samples_per_prompt
            (group,) = source.get_samples(1)
        return list(group)
