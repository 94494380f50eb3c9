"""`ReplayBufferConfig`: what XTuner's trainers build their buffer from."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from redrb.compat.xtuner.buffer import ReplayBuffer
from redrb.compat.xtuner.tasks import BufferSettings, ReplayOrder
from redrb.connection import connect
from redrb.connection.url import parse_address
from redrb.errors import ConfigError


class ReplayBufferConfig:
    """The `replay_buffer_config` of XTuner's colocated and disaggregated trainers.

    It makes an object of a class below both of XTuner's own configurations, which the trainers ask
    for. The object's `build()` connects, and returns a `ReplayBuffer` of XTuner's `RolloutState`,
    whose `on_discard` releases trace sessions as XTuner's buffer does.

    Examples:
        >>> config = RLDisaggregatedTrainerConfig(
        ...     replay_buffer_config=ReplayBufferConfig("redis://host", "run7", order="stalest"),
        ...     ...,
        ... )
    """

    def __new__(
        cls,
        url: str,
        namespace: str = "default",
        *,
        order: ReplayOrder = "fifo",
        run: str = "",
        **options: Any,
    ) -> Any:
        """Return a configuration, without a request to Redis.

        Args:
            url: Where Redis is, as for `redrb.connect`.
            order: "fifo", as XTuner's `SyncReplayBufferConfig` has it, or "stalest", as its
                `AsyncReplayBufferConfig`.
            run: Name of the run, which the same run gives whenever it starts. "": a new run, or
                that of the checkpoint that it resumes. A trainer that saves no buffer in its
                checkpoints (`checkpoint_no_save_replay_buffer`) needs a name to go on.
            options: Further options of `ReplayBuffer`.

        Raises:
            ConfigError: XTuner is not installed; or a name, the order or an option cannot be used.
        """
        parse_address(url)
        made: dict[str, Any] = {"order": order, "namespace": namespace, "run": run}
        try:
            BufferSettings(rollout_type=None, **made, **options)
            return _plug({"url": url, **made, "options": options})
        except (TypeError, ImportError) as error:
            raise ConfigError(
                f"{error}: ReplayBufferConfig needs XTuner, whose rollouts it holds, and takes the "
                "other options of ReplayBuffer."
            ) from error


def _plug(fields: dict[str, Any]) -> Any:
    return _class_below(import_module("xtuner.v1.rl.replay_buffer"))(**fields)


@cache
def _class_below(buffers: Any) -> Any:
    """Return the class of the configurations, which is below both of XTuner's."""
    from pydantic import Field, create_model  # XTuner has it

    return create_model(
        "ReplayBufferConfig",
        __base__=(_Plug, buffers.SyncReplayBufferConfig, buffers.AsyncReplayBufferConfig),
        __module__=__name__,
        url=(str, Field(repr=False, exclude=True)),  # it may contain a password
        namespace=(str, ...),
        order=(str, ...),
        run=(str, ...),
        options=(dict[str, Any], ...),
    )


class _Buffer(ReplayBuffer):
    """A buffer with a client of its own."""

    async def close(self) -> None:
        await super().close()
        self._tasks.client.close()


class _Plug:
    def build(self: Any) -> ReplayBuffer:
        """Connect, and return the buffer; its `close` closes the connection, too."""
        rollouts = import_module("xtuner.v1.data_proto.rl_data")
        traces = import_module("xtuner.v1.rl.rollout.trace_store")
        made = {"order": self.order, "namespace": self.namespace, "run": self.run}
        made["on_discard"] = traces.release_and_discard_rollout_groups
        client = connect(self.url)
        return _Buffer(client, rollout_type=rollouts.RolloutState, **made | self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plug, (vars(self),)  # pickle finds no class that is made at runtime
