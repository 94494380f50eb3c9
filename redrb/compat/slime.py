"""slime on streams: a data source and a rollout function whose groups outlive the job.

    --data-source-path redrb.compat.slime.RedrbDataSource
    --rollout-function-path redrb.compat.slime.generate_rollout

Settings are attributes of slime's arguments, which a `--custom-config-path` sets, or variables of
the environment: docs/how-to/slime.md. slime is imported when it is needed, so that makers need only
redrb.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

from redrb.compat.sample_groups import GroupDataSource, job
from redrb.compat.sample_groups.packing import samples_in
from redrb.errors import ConfigError

__all__ = ["RedrbDataSource", "generate_rollout", "put_groups"]

_SGLANG = "slime.rollout.sglang_rollout.generate_rollout"


class RedrbDataSource(GroupDataSource):
    """slime's data source in Redis: aborted and surplus groups, and the place in the data set.

    Processes that name the same task share one pass through the data set. A group that a killed
    process had from `get_samples` is handed out again.
    """

    framework: ClassVar[str] = "slime"


def generate_rollout(
    args: Any,
    rollout_id: int,
    data_source: Any,
    evaluation: bool = False,  # noqa: FBT001
) -> Any:
    """Return the groups of a rollout; slime calls it.

    They are those that makers have put, oldest first. If too few wait and `redrb_rollout_function`
    names a rollout function, such as slime's own, this makes groups, which are put as well: what
    the rollout does not use is left for the next one. The groups are acknowledged when slime calls
    `data_source.save`.

    Args:
        evaluation: Call `redrb_rollout_function`, or else slime's own.

    Raises:
        ConfigError: The data source is another one.
        BatchTimeout: Too few groups came within `redrb_timeout`.
    """
    base = import_module("slime.rollout.base_types")
    load_function = import_module("slime.utils.misc").load_function
    local = getattr(args, "redrb_rollout_function", None)
    if evaluation:
        made = load_function(local or _SGLANG)
        return base.call_rollout_fn(made, args, rollout_id, data_source, evaluation=True)
    if not isinstance(data_source, RedrbDataSource):
        raise ConfigError(
            "groups would never be acknowledged: give slime --data-source-path "
            "redrb.compat.slime.RedrbDataSource as well."
        )
    groups = data_source.groups
    metrics: dict[str, Any] = {}
    while local and groups.finished.count() < args.rollout_batch_size:
        made = load_function(local)
        output = base.call_rollout_fn(made, args, rollout_id, data_source, evaluation=False)
        data_source.put(output.samples)
        metrics.update(output.metrics or {})
    taken = groups.take(rollout_id, args.rollout_batch_size, args.n_samples_per_prompt)
    groups.note(rollout_id)
    samples = sorted(
        (each.group for each in taken), key=lambda group: next(samples_in(group)).index
    )
    metrics["rollout/redrb/waiting_groups"] = groups.finished.count()
    return base.RolloutFnTrainOutput(samples=samples, metrics=metrics)


def put_groups(
    groups: Sequence[Sequence[Any]], *, args: Any = None, timeout: float | None = None
) -> None:
    """Store finished groups for a trainer, from any machine; a maker calls it.

    Args:
        groups: Lists of `Sample`s, or of the dicts that `Sample.to_dict` returns. `tokens`,
            `response_length`, `reward` and `status` are needed, as slime says; numbers of samples
            and groups are not, and are given anew.
        args: Has `redrb_url`, `redrb_namespace` and `redrb_task`; default: the variables REDRB_URL,
            REDRB_NAMESPACE and REDRB_TASK.
        timeout: Seconds to wait for room; None waits for ever.

    Raises:
        RecordError: A field of a sample cannot be stored; nothing was stored.
        StoreFull: There was no room in time; `stored` says how many groups, from the first, are in.
        StoreUnavailable: Redis stayed away; `uncertain` says whether the put may have landed.
    """
    job.put_groups("slime", groups, args, timeout)
