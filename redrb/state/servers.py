"""Reads what a server says of itself: the command INFO."""

from __future__ import annotations

from collections.abc import Mapping

from redrb.connection.transport import Reply
from redrb.state.model import ServerState


def server_state(
    reply: Reply, *, address: str, latency_s: float, cli: tuple[str, ...] = ()
) -> ServerState:
    """Return a server's state from the reply to INFO; a missing figure is 0 or "".

    Args:
        reply: The reply.
        address: Where the server is.
        latency_s: Seconds until the reply came.
        cli: Options with which redis-cli reaches it.
    """
    info = _fields(reply)
    number = _Numbers(info)
    return ServerState(
        address=address,
        kind="valkey" if "valkey_version" in info else "redis",
        version=info.get("valkey_version") or info.get("redis_version", ""),
        mode=info.get("server_mode") or info.get("redis_mode") or "standalone",
        uptime_s=number("uptime_in_seconds"),
        used_memory=int(number("used_memory")),
        maxmemory=int(number("maxmemory")),
        maxmemory_policy=info.get("maxmemory_policy", ""),
        clients=int(number("connected_clients")),
        blocked_clients=int(number("blocked_clients")),
        commands_per_s=number("instantaneous_ops_per_sec"),
        cpu_s=number("used_cpu_sys") + number("used_cpu_user"),
        aof=info.get("aof_enabled") == "1",
        last_save_ok="err"
        not in (info.get("rdb_last_bgsave_status"), info.get("aof_last_write_status")),
        replicas=int(number("connected_slaves")),
        allocator=info.get("mem_allocator", ""),
        latency_s=latency_s,
        cli=cli,
    )


class _Numbers:
    """Returns figures by name as numbers."""

    def __init__(self, info: Mapping[str, str]) -> None:
        self._info = info

    def __call__(self, name: str) -> float:
        try:
            return float(self._info.get(name) or 0)
        except ValueError:
            return 0.0


def _fields(reply: Reply) -> dict[str, str]:
    if isinstance(reply, dict):  # redis-py has parsed it
        return {str(name): str(value) for name, value in reply.items()}
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in pairs if colon}
