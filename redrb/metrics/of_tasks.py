"""The metrics of tasks and their consumer groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from redrb.metrics.metric import Metric, Sample, of_group, of_task
from redrb.state.findings.wording import number_of
from redrb.state.model import State, TaskState
from redrb.stream.task.ledger import AdmissionStats, PartStats, StreamStats


def _stats(value: Callable[[StreamStats], float | None]) -> Callable[[TaskState], float | None]:
    """Return a figure of the whole task: every consumer group has the same."""
    return lambda task: value(task.main.stats) if task.main else None


def _admission(
    value: Callable[[AdmissionStats], float],
) -> Callable[[TaskState], float | None]:
    return _stats(lambda stats: value(stats.admission) if stats.admission else None)


def _parts(value: Callable[[PartStats], float]) -> Callable[[TaskState], float | None]:
    return _stats(lambda stats: value(stats.parts) if stats.parts else None)


def _waiting(state: State) -> Iterator[Sample]:
    for task in state.tasks:
        for group in task.groups:
            found = {status.value: n for status, n in group.stats.waiting.items()}
            for status, groups in ({"completed": 0} | found).items():
                yield (task.name, group.name, status), groups


def _staleness(figure: str) -> Callable[[State], Iterator[Sample]]:
    def read(state: State) -> Iterator[Sample]:
        for task in state.tasks:
            for group in task.groups:
                places = {"waiting": group.staleness.waiting, "leased": group.staleness.leased}
                for place, histogram in places.items():
                    value = getattr(histogram, figure)
                    if value is not None:
                        yield (task.name, group.name, place), value

    return read


TASK_METRICS: tuple[Metric, ...] = (
    of_group(
        "redrb_groups_put_total",
        "counter",
        "Groups that the consumer group found when it joined, and groups put since then.",
        lambda group: group.stats.ledger.put,
    ),
    of_group(
        "redrb_groups_acked_total",
        "counter",
        "Groups acknowledged: they were trained, or forwarded to another task.",
        lambda group: group.stats.ledger.acked,
    ),
    of_group(
        "redrb_groups_expired_total",
        "counter",
        "Groups discarded because they were staler than max_staleness.",
        lambda group: group.stats.ledger.expired,
    ),
    of_group(
        "redrb_groups_filtered_total",
        "counter",
        "Groups dropped by a filter when they were put.",
        lambda group: group.stats.ledger.filtered,
    ),
    of_group(
        "redrb_groups_evicted_total",
        "counter",
        "Groups dropped to make room for newer ones.",
        lambda group: group.stats.ledger.evicted,
    ),
    of_group(
        "redrb_groups_dead",
        "gauge",
        "Groups that are dead letters, dropped ones included; it falls when they are requeued.",
        lambda group: group.stats.ledger.dead,
    ),
    of_group(
        "redrb_groups_returned_total",
        "counter",
        "Times that a leased group returned to the queue, for any reason.",
        lambda group: group.stats.returned,
    ),
    of_group(
        "redrb_groups_taken_over_total",
        "counter",
        "Times that a leased group was taken from a consumer whose heartbeat stopped.",
        lambda group: group.stats.taken_over,
    ),
    Metric(
        "redrb_groups_waiting",
        "gauge",
        "Groups that wait, by their status; trainers take completed ones.",
        ("task", "group", "status"),
        _waiting,
    ),
    of_group(
        "redrb_groups_leased", "gauge", "Leased groups.", lambda group: group.stats.ledger.leased
    ),
    of_group(
        "redrb_ledger_balanced",
        "gauge",
        "1 if every group is accounted for; 0 if one was lost or counted twice.",
        lambda group: group.stats.ledger.balanced,
    ),
    of_group(
        "redrb_samples_acked_total",
        "counter",
        "Samples in the acknowledged groups.",
        lambda group: group.stats.samples_acked,
    ),
    of_group(
        "redrb_consumers",
        "gauge",
        "Consumers whose heartbeat is fresh.",
        lambda group: group.stats.consumers,
    ),
    of_group(
        "redrb_takes_waiting",
        "gauge",
        "Takes that wait for a full batch.",
        lambda group: group.stats.consumers_waiting,
    ),
    of_group(
        "redrb_taken_staleness_versions",
        "histogram",
        "Staleness of all groups ever taken, as they were when they were taken, in versions.",
        lambda group: group.staleness.taken,
    ),
    Metric(
        "redrb_staleness_mean_versions",
        "gauge",
        "Mean staleness of the groups that wait or are leased, in versions.",
        ("task", "group", "place"),
        _staleness("mean"),
    ),
    Metric(
        "redrb_staleness_max_versions",
        "gauge",
        "Largest staleness of the groups that wait or are leased, in versions.",
        ("task", "group", "place"),
        _staleness("largest"),
    ),
    of_task(
        "redrb_staleness_bound_versions",
        "gauge",
        "The setting max_staleness; absent without one.",
        lambda task: number_of(task, "max_staleness"),
    ),
    of_task(
        "redrb_task_version",
        "gauge",
        "Newest weight version that the task knows; absent before the first one.",
        _stats(lambda stats: stats.version or None),
    ),
    of_task(
        "redrb_samples_put_total",
        "counter",
        "Samples in all groups ever put.",
        _stats(lambda stats: stats.samples_put),
    ),
    of_task(
        "redrb_put_bytes_total",
        "counter",
        "Bytes of all groups ever put, as stored.",
        _stats(lambda stats: stats.bytes_put),
    ),
    of_task(
        "redrb_groups_stored",
        "gauge",
        "Groups that any consumer group needs.",
        _stats(lambda stats: stats.stored),
    ),
    of_task(
        "redrb_stored_bytes",
        "gauge",
        "Bytes of the stored groups, estimated by the mean size of all groups put.",
        lambda task: task.stored_bytes,
    ),
    of_task(
        "redrb_groups_limit",
        "gauge",
        "The setting limit, at which puts wait; absent without one.",
        _stats(lambda stats: stats.limit or None),
    ),
    of_task(
        "redrb_limit_bytes",
        "gauge",
        "The setting max_bytes, at which puts wait; absent without one.",
        _stats(lambda stats: stats.max_bytes or None),
    ),
    of_task(
        "redrb_dead_letters",
        "gauge",
        "Dead letters that are stored, of all consumer groups.",
        _stats(lambda stats: stats.dead_letters),
    ),
    of_task(
        "redrb_puts_waiting",
        "gauge",
        "Puts that wait for room.",
        _stats(lambda stats: stats.producers_waiting),
    ),
    of_task(
        "redrb_rights_granted_total",
        "counter",
        "Rights to begin groups that were given; absent without admission, as all redrb_rights.",
        _admission(lambda rights: rights.granted),
    ),
    of_task(
        "redrb_rights_lost_total",
        "counter",
        "Rights taken back from makers that died, or held them for too long.",
        _admission(lambda rights: rights.lost),
    ),
    of_task(
        "redrb_rights_held",
        "gauge",
        "Rights that makers hold.",
        _admission(lambda rights: rights.held),
    ),
    of_task(
        "redrb_rights_waiting",
        "gauge",
        "Requests that wait for rights.",
        _admission(lambda rights: rights.waiting),
    ),
    of_task(
        "redrb_parts_waiting",
        "gauge",
        "Parts of groups that wait for further parts; absent if no group came in parts.",
        _parts(lambda parts: parts.waiting),
    ),
    of_task(
        "redrb_part_groups_dropped_total",
        "counter",
        "Groups in parts that were removed incomplete; absent if no group came in parts.",
        _parts(lambda parts: parts.dropped),
    ),
)
"""The metrics of tasks."""
