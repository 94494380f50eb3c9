"""The table of all metrics of a namespace, as `redrb exporter` serves them."""

from __future__ import annotations

from redrb.metrics import metric as of
from redrb.metrics.metric import Metric, metrics_of
from redrb.state.findings.wording import number_of

UP = ("redrb_up", "1 if the newest figures of Redis are fresh; 0 if Redis does not answer.")
AGE = (
    "redrb_state_age_seconds",
    "Seconds since the figures were read. Beyond five seconds only this and redrb_up are served.",
)
"""The two gauges that are served whatever happens: name and help."""

METRICS: tuple[Metric, ...] = (
    *metrics_of(
        (),
        lambda state: [((), state)],
        {
            "redrb_look_seconds": ("took_s", "Seconds that the newest look at Redis took."),
            "redrb_tasks": (
                "tasks_total",
                "Tasks of the namespace; at most 200 of them have metrics.",
            ),
        },
    ),
    *metrics_of(
        ("severity", "code"),
        of.findings,
        {
            "redrb_findings": (
                "",
                "Troubles that `redrb doctor` would name, by severity and code (docs/doctor.md).",
            )
        },
    ),
    *metrics_of(
        ("task", "group"),
        of.groups,
        {
            "redrb_groups_put_total": (
                "stats.ledger.put",
                "Groups that the consumer group found when it joined, and groups put since then.",
            ),
            "redrb_groups_acked_total": (
                "stats.ledger.acked",
                "Groups acknowledged: they were trained, or forwarded to another task.",
            ),
            "redrb_groups_expired_total": (
                "stats.ledger.expired",
                "Groups discarded because they were staler than max_staleness.",
            ),
            "redrb_groups_filtered_total": (
                "stats.ledger.filtered",
                "Groups dropped by a filter when they were put.",
            ),
            "redrb_groups_evicted_total": (
                "stats.ledger.evicted",
                "Groups dropped to make room for newer ones.",
            ),
            "redrb_groups_dead": (
                "stats.ledger.dead",
                (
                    "Groups that are dead letters, dropped ones included; it falls when they are "
                    "requeued."
                ),
            ),
            "redrb_groups_returned_total": (
                "stats.returned",
                "Times that a leased group returned to the queue, for any reason.",
            ),
            "redrb_groups_taken_over_total": (
                "stats.taken_over",
                "Times that a leased group was taken from a consumer whose heartbeat stopped.",
            ),
            "redrb_groups_leased": ("stats.ledger.leased", "Leased groups."),
            "redrb_ledger_balanced": (
                "stats.ledger.balanced",
                "1 if every group is accounted for; 0 if one was lost or counted twice.",
            ),
            "redrb_samples_acked_total": (
                "stats.samples_acked",
                "Samples in the acknowledged groups.",
            ),
            "redrb_consumers": ("stats.consumers", "Consumers whose heartbeat is fresh."),
            "redrb_takes_waiting": ("stats.consumers_waiting", "Takes that wait for a full batch."),
        },
    ),
    Metric(
        "redrb_taken_staleness_versions",
        "Staleness of all groups ever taken, as they were when they were taken, in versions.",
        ("task", "group"),
        of.groups,
        "staleness.taken",
        "histogram",
    ),
    *metrics_of(
        ("task", "group", "status"),
        of.pools,
        {
            "redrb_groups_waiting": (
                "",
                "Groups that wait, by their status; trainers take completed ones.",
            )
        },
    ),
    *metrics_of(
        ("task", "group", "place"),
        of.staleness,
        {
            "redrb_staleness_mean_versions": (
                "mean",
                "Mean staleness of the groups that wait or are leased, in versions.",
            ),
            "redrb_staleness_max_versions": (
                "largest",
                "Largest staleness of the groups that wait or are leased, in versions.",
            ),
        },
    ),
    *metrics_of(
        ("task",),
        of.tasks,
        {
            "redrb_staleness_bound_versions": (
                lambda task: number_of(task, "max_staleness"),
                "The setting max_staleness; absent without one.",
            ),
            "redrb_task_version": (
                lambda task: task.main.stats.version or None,
                "Newest weight version that the task knows; absent before the first one.",
            ),
            "redrb_samples_put_total": (
                "main.stats.samples_put",
                "Samples in all groups ever put.",
            ),
            "redrb_put_bytes_total": (
                "main.stats.bytes_put",
                "Bytes of all groups ever put, as stored.",
            ),
            "redrb_groups_stored": ("main.stats.stored", "Groups that any consumer group needs."),
            "redrb_stored_bytes": (
                "stored_bytes",
                "Bytes of the stored groups, estimated by the mean size of all groups put.",
            ),
            "redrb_groups_limit": (
                lambda task: task.main.stats.limit or None,
                "The setting limit, at which puts wait; absent without one.",
            ),
            "redrb_limit_bytes": (
                lambda task: task.main.stats.max_bytes or None,
                "The setting max_bytes, at which puts wait; absent without one.",
            ),
            "redrb_dead_letters": (
                "main.stats.dead_letters",
                "Dead letters that are stored, of all consumer groups.",
            ),
            "redrb_puts_waiting": ("main.stats.producers_waiting", "Puts that wait for room."),
            "redrb_rights_granted_total": (
                "main.stats.admission.granted",
                (
                    "Rights to begin groups that were given; absent without admission, as all "
                    "redrb_rights."
                ),
            ),
            "redrb_rights_lost_total": (
                "main.stats.admission.lost",
                "Rights taken back from makers that died, or held them for too long.",
            ),
            "redrb_rights_held": ("main.stats.admission.held", "Rights that makers hold."),
            "redrb_rights_waiting": (
                "main.stats.admission.waiting",
                "Requests that wait for rights.",
            ),
            "redrb_parts_waiting": (
                "main.stats.parts.waiting",
                "Parts of groups that wait for further parts; absent if no group came in parts.",
            ),
            "redrb_part_groups_dropped_total": (
                "main.stats.parts.dropped",
                "Groups in parts that were removed incomplete; absent if no group came in parts.",
            ),
        },
    ),
    *metrics_of(
        ("task", "role", "life"),
        of.lives,
        {
            "redrb_workers": (
                "",
                (
                    "Workers by role and life: live, silent (a heartbeat is overdue), dead, ended; "
                    "of each task at most 200, the newest."
                ),
            )
        },
    ),
    *metrics_of(
        ("task", "role", "worker"),
        of.shown_workers,
        {
            "redrb_worker_up": (
                lambda worker: worker.life != "dead",
                "1 while the worker's heartbeat comes; 0 for ten minutes after it died.",
            ),
            "redrb_worker_seen_seconds": (
                "seen_s",
                "Seconds since the worker's last announcement.",
            ),
        },
    ),
    *metrics_of(
        ("task", "role", "worker"),
        of.live_workers,
        {
            "redrb_worker_uptime_seconds": ("uptime_s", "Seconds since the worker began."),
            "redrb_worker_groups_total": (
                "groups",
                "Groups that the worker has put, or acknowledged, since it began.",
            ),
            "redrb_worker_samples_total": ("samples", "Samples in these groups."),
            "redrb_worker_leased_groups": ("leased", "Groups that the worker leases."),
            "redrb_worker_rights_held": ("rights", "Rights to begin groups that the worker holds."),
            "redrb_worker_version": (
                lambda worker: worker.weight_version or None,
                (
                    "Weight version that the worker uses or has published; absent before the "
                    "first one."
                ),
            ),
            "redrb_worker_behind_versions": (
                lambda worker: worker.behind if worker.weight_version else None,
                (
                    "Weight versions that the task knew at the worker's last announcement, and "
                    "that it did not use."
                ),
            ),
            "redrb_worker_steps_total": (
                "steps",
                (
                    "Steps that the worker has ended since it began: of a trainer or stage from a "
                    "batch to the request for the next one, of a maker from its right to begin "
                    "groups until they are put."
                ),
            ),
            "redrb_worker_step_seconds_total": (
                "steps_s",
                (
                    "Seconds that these steps lasted; the rest of a trainer's time it waited for "
                    "batches."
                ),
            ),
            "redrb_worker_reward": (
                lambda worker: worker.metrics.get("reward"),
                "Mean reward that the worker announced last.",
            ),
            "redrb_worker_loss": (
                lambda worker: worker.metrics.get("loss", worker.metrics.get("actor_loss")),
                "Loss that the worker announced last.",
            ),
            "redrb_worker_kl": (
                lambda worker: worker.metrics.get("kl", worker.metrics.get("approx_kl")),
                "KL divergence that the worker announced last.",
            ),
        },
    ),
    *metrics_of(
        ("task", "role", "worker", "waits_for"),
        of.waiting_workers,
        {
            "redrb_worker_waiting_seconds": (
                "waits_s",
                (
                    "Seconds for which the worker has waited: for a batch, room, a right or "
                    "weights; absent while it works."
                ),
            )
        },
    ),
    *metrics_of(
        ("weights",),
        of.weights,
        {
            "redrb_weights_version": ("version", "The newest published version."),
            "redrb_weights_age_seconds": (
                "age_s",
                "Seconds since the newest version was published.",
            ),
            "redrb_weights_bytes": ("nbytes", "Bytes of the newest version's tensors."),
            "redrb_weights_stored_bytes": (
                "stored_bytes",
                "Bytes of the newest version in Redis, with chunks that other versions share.",
            ),
            "redrb_weights_kept_versions": ("versions", "Versions that are kept."),
            "redrb_weights_readers": ("pins", "Readers that fetch versions now."),
        },
    ),
    *metrics_of(
        ("server",),
        of.servers,
        {
            "redrb_server_memory_used_bytes": ("used_memory", "Memory that the server uses."),
            "redrb_server_memory_limit_bytes": (
                lambda server: server.maxmemory or None,
                "Its limit of memory, maxmemory; absent without one.",
            ),
            "redrb_server_evicts_keys": (
                lambda server: server.maxmemory_policy not in ("", "noeviction"),
                (
                    "1 if maxmemory-policy lets the server delete groups and counters at its limit "
                    "of memory."
                ),
            ),
            "redrb_server_last_save_ok": (
                "last_save_ok",
                "1 if the last snapshot, and the last write of the append-only file, succeeded.",
            ),
            "redrb_server_cpu_seconds_total": (
                "cpu_s",
                "Processor time of the server since it started.",
            ),
            "redrb_server_uptime_seconds": ("uptime_s", "Seconds since the server started."),
            "redrb_server_latency_seconds": (
                "latency_s",
                "Time from the exporter's request to the reply, in the newest look.",
            ),
            "redrb_server_clients": ("clients", "Connected clients."),
            "redrb_server_blocked_clients": (
                "blocked_clients",
                "Clients that block, such as waiting makers and trainers.",
            ),
            "redrb_server_replicas": ("replicas", "Connected replicas."),
        },
    ),
)
"""All metrics of a state."""
