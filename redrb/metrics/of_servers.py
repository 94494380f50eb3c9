"""The metrics of servers and of published weights."""

from __future__ import annotations

from redrb.metrics.metric import Metric, of_server, of_weights

SERVER_METRICS: tuple[Metric, ...] = (
    of_server(
        "redrb_server_memory_used_bytes",
        "gauge",
        "Memory that the server uses.",
        lambda server: server.used_memory,
    ),
    of_server(
        "redrb_server_memory_limit_bytes",
        "gauge",
        "Its limit of memory, maxmemory; absent without one.",
        lambda server: server.maxmemory or None,
    ),
    of_server(
        "redrb_server_evicts_keys",
        "gauge",
        "1 if maxmemory-policy lets the server delete groups and counters at its limit of memory.",
        lambda server: server.maxmemory_policy not in ("", "noeviction"),
    ),
    of_server(
        "redrb_server_last_save_ok",
        "gauge",
        "1 if the last snapshot, and the last write of the append-only file, succeeded.",
        lambda server: server.last_save_ok,
    ),
    of_server(
        "redrb_server_cpu_seconds_total",
        "counter",
        "Processor time of the server since it started.",
        lambda server: server.cpu_s,
    ),
    of_server(
        "redrb_server_uptime_seconds",
        "gauge",
        "Seconds since the server started.",
        lambda server: server.uptime_s,
    ),
    of_server(
        "redrb_server_latency_seconds",
        "gauge",
        "Time from the exporter's request to the reply, in the newest look.",
        lambda server: server.latency_s,
    ),
    of_server("redrb_server_clients", "gauge", "Connected clients.", lambda server: server.clients),
    of_server(
        "redrb_server_blocked_clients",
        "gauge",
        "Clients that block, such as waiting makers and trainers.",
        lambda server: server.blocked_clients,
    ),
    of_server(
        "redrb_server_replicas", "gauge", "Connected replicas.", lambda server: server.replicas
    ),
)
"""The metrics of servers; of a cluster, of all primaries."""

WEIGHTS_METRICS: tuple[Metric, ...] = (
    of_weights(
        "redrb_weights_version",
        "gauge",
        "The newest published version.",
        lambda weights: weights.version,
    ),
    of_weights(
        "redrb_weights_age_seconds",
        "gauge",
        "Seconds since the newest version was published.",
        lambda weights: weights.age_s,
    ),
    of_weights(
        "redrb_weights_bytes",
        "gauge",
        "Bytes of the newest version's tensors.",
        lambda weights: weights.nbytes,
    ),
    of_weights(
        "redrb_weights_stored_bytes",
        "gauge",
        "Bytes of the newest version in Redis, with chunks that other versions share.",
        lambda weights: weights.stored_bytes,
    ),
    of_weights(
        "redrb_weights_kept_versions",
        "gauge",
        "Versions that are kept.",
        lambda weights: weights.versions,
    ),
    of_weights(
        "redrb_weights_readers",
        "gauge",
        "Readers that fetch versions now.",
        lambda weights: weights.pins,
    ),
)
"""The metrics of published weights."""
