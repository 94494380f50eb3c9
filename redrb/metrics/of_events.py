"""The metrics that a worker serves about its own process, from the events that it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

EventKind: TypeAlias = Literal["counter", "gauge", "summary"]
"""counter: the sum of a value; gauge: its newest; summary: its sum, and the number of events."""


@dataclass(frozen=True, slots=True)
class EventMetric:
    """One metric of a worker's process.

    Attributes:
        name: Its name with its unit, as Prometheus shows it.
        kind: How the values of events make it.
        help: What it counts or measures.
        event: The event that it is made of.
        keys: Names of its value in the event, of which the first that is there counts; none: the
            events are counted.
    """

    name: str
    kind: EventKind
    help: str
    event: str
    keys: tuple[str, ...] = ()


EVENT_METRICS: tuple[EventMetric, ...] = (
    EventMetric("redrb_trainer_steps_total", "counter", "Steps trained.", "step"),
    EventMetric("redrb_trainer_groups_total", "counter", "Groups trained.", "step", ("groups",)),
    EventMetric("redrb_trainer_samples_total", "counter", "Samples trained.", "step", ("samples",)),
    EventMetric("redrb_trainer_step_seconds", "summary", "Time of steps.", "step", ("step_s",)),
    EventMetric(
        "redrb_trainer_batch_wait_seconds",
        "summary",
        "Time for which steps waited for a full batch.",
        "step",
        ("wait_for_batch_s",),
    ),
    EventMetric(
        "redrb_trainer_staleness_mean_versions",
        "gauge",
        "Mean staleness of the samples of the newest batch, in versions.",
        "step",
        ("staleness_mean",),
    ),
    EventMetric(
        "redrb_trainer_staleness_max_versions",
        "gauge",
        "Largest staleness of a sample of the newest batch, in versions.",
        "step",
        ("staleness_max",),
    ),
    EventMetric(
        "redrb_trainer_reward",
        "gauge",
        "Mean reward of the newest batch.",
        "step",
        ("reward",),
    ),
    EventMetric(
        "redrb_trainer_loss",
        "gauge",
        "Loss of the newest step: the recipe's metric loss, or actor_loss.",
        "step",
        ("loss", "actor_loss"),
    ),
    EventMetric(
        "redrb_trainer_kl",
        "gauge",
        "KL divergence of the newest step: the recipe's metric kl, or approx_kl.",
        "step",
        ("kl", "approx_kl"),
    ),
    EventMetric(
        "redrb_trainer_evaluation_reward",
        "gauge",
        "Reward of the newest evaluation.",
        "evaluation",
        ("reward",),
    ),
    EventMetric(
        "redrb_trainer_version",
        "gauge",
        "Weight version that was published last.",
        "publish",
        ("weight_version",),
    ),
    EventMetric(
        "redrb_trainer_publish_seconds",
        "summary",
        "Time for which publishing weights held up the training loop.",
        "publish",
        ("publish_s",),
    ),
    EventMetric(
        "redrb_trainer_published_bytes_total",
        "counter",
        "Bytes of weights that were sent to Redis.",
        "publish",
        ("bytes_sent",),
    ),
    EventMetric(
        "redrb_trainer_lost_batches_total",
        "counter",
        "Batches that another trainer trains again, because their lease was lost.",
        "lease_lost",
    ),
    EventMetric(
        "redrb_trainer_misfits_total",
        "counter",
        "Batches with groups that did not fit together, or lacked a field; they are dead letters.",
        "misfits",
    ),
    EventMetric("redrb_maker_steps_total", "counter", "Steps made.", "put"),
    EventMetric("redrb_maker_groups_total", "counter", "Groups made.", "put", ("groups",)),
    EventMetric("redrb_maker_samples_total", "counter", "Samples made.", "put", ("samples",)),
    EventMetric("redrb_maker_step_seconds", "summary", "Time of steps.", "put", ("step_s",)),
    EventMetric(
        "redrb_maker_make_seconds",
        "summary",
        "Time of generation and scoring; absent for episodes.",
        "put",
        ("make_s",),
    ),
    EventMetric(
        "redrb_maker_right_wait_seconds",
        "summary",
        "Time for which steps waited for the right to begin groups.",
        "put",
        ("admission_s",),
    ),
    EventMetric(
        "redrb_maker_room_wait_seconds",
        "summary",
        "Time for which steps waited for room in the task.",
        "put",
        ("backpressure_s",),
    ),
    EventMetric(
        "redrb_maker_fetch_seconds",
        "summary",
        "Time for which steps waited for new weights.",
        "put",
        ("fetch_s",),
    ),
    EventMetric(
        "redrb_maker_reward", "gauge", "Mean reward of the newest step.", "put", ("reward",)
    ),
    EventMetric(
        "redrb_maker_version",
        "gauge",
        "Weight version of the newest step.",
        "put",
        ("policy_version",),
    ),
    EventMetric("redrb_stage_batches_total", "counter", "Batches that the stage ended.", "stage"),
    EventMetric("redrb_stage_groups_total", "counter", "Groups forwarded.", "stage", ("groups",)),
    EventMetric(
        "redrb_stage_filtered_groups_total",
        "counter",
        "Groups that the function filtered.",
        "stage",
        ("filtered",),
    ),
    EventMetric(
        "redrb_stage_failed_deliveries_total",
        "counter",
        "Groups for which the function raised, or that the next task refused.",
        "stage",
        ("failed",),
    ),
    EventMetric(
        "redrb_stage_batch_wait_seconds",
        "summary",
        "Time for which batches waited for groups.",
        "stage",
        ("wait_for_batch_s",),
    ),
    EventMetric(
        "redrb_stage_function_seconds",
        "summary",
        "Time of the function, with reading the groups.",
        "stage",
        ("function_s",),
    ),
    EventMetric(
        "redrb_stage_forward_seconds",
        "summary",
        "Time of forwarding, with waiting for room in the next task.",
        "stage",
        ("forward_s",),
    ),
    EventMetric(
        "redrb_stage_lost_batches_total",
        "counter",
        "Batches whose lease was lost: another stage forwards their groups.",
        "stage_lost",
    ),
)
"""The metrics of a worker's process."""
