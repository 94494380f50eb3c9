"""`ReplayBufferConfig`: what XTuner's trainers build their buffer from."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from redrb.checks import check_choice
from redrb.compat.xtuner.buffer import ReplayBuffer
from redrb.compat.xtuner.tasks import STREAM_ORDERS, ReplayOrder
from redrb.connection import connect
from redrb.errors import ConfigError
from redrb.keys import check_name


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
        check_name("namespace", namespace)
        check_choice("order", order, list(STREAM_ORDERS))
        if run != "":
            check_name("run", run)
        made = {"order": order, "namespace": namespace, "run": run}
        try:
            signature(ReplayBuffer).bind(None, rollout_type=None, **made, **options)
            buffers = import_module("xtuner.v1.rl.replay_buffer")
        except (TypeError, ImportError) as error:
            raise ConfigError(
                f"{error}: ReplayBufferConfig needs XTuner, and takes options of ReplayBuffer."
            ) from error
        return _class_below(buffers)(url=url, **made, options=options)


@cache
def _class_below(buffers: Any) -> Any:
    """Return the class of the configurations, which is below both of XTuner's."""
    from pydantic import Field, create_model  # XTuner has it

    return create_model(
        "ReplayBufferConfig",
        __base__=(_Plug, buffers.SyncReplayBufferConfig, buffers.AsyncReplayBufferConfig),
        __module__=__name__,
        url=(str, Field(repr=False)),  # it may contain a password
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
        made = {"order": self.order, "namespace": self.namespace, "run": self.run}
        rollouts = import_module("xtuner.v1.data_proto.rl_data")
        traces = import_module("xtuner.v1.rl.rollout.trace_store")
        made["on_discard"] = traces.release_and_discard_rollout_groups
        client = connect(self.url)
        return _Buffer(client, rollout_type=rollouts.RolloutState, **made | self.options)
