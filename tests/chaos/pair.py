"""A primary that acknowledges what its disk has, its replica, and the proxy before the primary."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.chaos.failovers import Failover, Span
from tests.clocks import remove_shared_memory
from tests.proxy import Proxy
from tests.servers import Server
from tests.tools import find

FAKETIME = find("libfaketime")
_DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
_QUICK_SYNC = ("--repl-diskless-sync-delay", "0")
_FAILOVER_S = 5.0


@cache
def clocks_jump(program: str) -> bool:
    """Return whether libfaketime is installed and works in a server; it does not with jemalloc."""
    if FAKETIME is None:
        return False
    preloaded = {**os.environ, "LD_PRELOAD": FAKETIME}
    pipe = subprocess.PIPE
    with subprocess.Popen([program, "--version"], env=preloaded, stdout=pipe, stderr=pipe) as shown:
        try:
            _, complaint = shown.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            shown.kill()
            complaint = b"libfaketime hangs"
    remove_shared_memory(shown.pid)
    return shown.returncode == 0 and b"libfaketime" not in complaint


class ClockedServer(Server):
    """A server whose clock can jump, where libfaketime works."""

    def environment(self) -> dict[str, str] | None:
        if FAKETIME is None or not clocks_jump(self.program):
            return None
        if not self._clock.exists():
            self._clock.write_text("+0")
        return {
            **os.environ,
            "LD_PRELOAD": FAKETIME,
            "FAKETIME_TIMESTAMP_FILE": str(self._clock),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def kill(self) -> None:
        """End the server with SIGKILL, and remove what libfaketime leaves then."""
        super().kill()
        remove_shared_memory(self.pid)

    def set_clock(self, seconds: int) -> None:
        """Let the server's clock differ from this machine's by so many seconds."""
        new = self._clock.with_suffix(".new")
        new.write_text(f"{seconds:+d}")
        new.replace(self._clock)

    @property
    def _clock(self) -> Path:
        return self.directory / "clock"


class Pair:
    """Two servers, one of which is the primary.

    Each write is in the append-only file before it is acknowledged (`appendfsync always`), so that
    a killed server loses nothing. A planned failover waits until the replica has everything.

    Attributes:
        up: Whether the primary runs.
        failovers: Unplanned failovers: the replica may lack the last writes.
        demoted: Planned failovers: until connections are cut, readers may still ask the former
            primary, a replica that is a little behind.
    """

    def __init__(self, program: str) -> None:
        self.primary = ClockedServer(program, *_DURABLE, *_QUICK_SYNC)
        self.replica = ClockedServer(program, *_DURABLE, *_QUICK_SYNC)
        self.proxy = Proxy("127.0.0.1", self.primary.port)
        self.up = True
        self.failovers: list[Failover] = []
        self.demoted: list[Span] = []
        self._follow(self.replica, self.primary)

    @contextmanager
    def admin(self, server: Server | None = None) -> Iterator[redis.Redis]:
        """Connect to the primary, or another server, without the proxy."""
        port = (server or self.primary).port
        with redis.Redis(port=port, socket_timeout=10, retry=Retry(NoBackoff(), 0)) as client:
            yield client

    def kill(self) -> None:
        """End the primary with SIGKILL."""
        self.up = False
        self.primary.kill()

    def restart(self) -> None:
        """Start the primary again, with the data of its file."""
        self.primary.start()
        self.up = True

    def pause(self) -> None:
        """Stop the primary with SIGSTOP."""
        self.up = False
        os.kill(self.primary.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the primary go on."""
        os.kill(self.primary.pid, signal.SIGCONT)
        self.up = True

    def in_sync(self) -> bool:
        """Return whether the replica follows the primary, and has loaded its data."""
        with self.admin() as primary, self.admin(self.replica) as replica:
            return _follows(replica.info("replication"), primary.info("replication"))

    def fail_over(self) -> None:
        """Make the replica the primary when it has everything; `cut` closes the connections."""
        self.demoted.append(Span(time.monotonic(), float("inf")))
        with self.admin() as client:
            client.execute_command(
                "FAILOVER",
                "TO",
                "127.0.0.1",
                self.replica.port,
                "TIMEOUT",
                int(_FAILOVER_S * 1000),
            )
        until = time.monotonic() + _FAILOVER_S + 1
        while not self._leads(self.replica):
            assert time.monotonic() < until, "a planned failover does not end"
            time.sleep(0.02)
        self._swap()

    def cut(self) -> None:
        """Close all connections, after a planned failover those to the former primary."""
        self.proxy.cut()
        self.demoted[-1] = self.demoted[-1]._replace(ended=time.monotonic())

    def fail_over_at_once(self) -> None:
        """Kill the primary and promote the replica, whatever it has; `rejoin` undoes the kill."""
        since = self._replicated()
        self.primary.kill()
        self.failovers.append(Failover(since, time.monotonic()))
        with self.admin(self.replica) as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        self._swap()

    def rejoin(self) -> None:
        """Start the server that was killed as the replica."""
        self.replica.start()
        self._follow(self.replica, self.primary)

    def allow_memory(self, used: float | None) -> None:
        """Set the memory limit to a share of what is in use; None: no limit."""
        for server in (self.primary,) if used else (self.primary, self.replica):
            with suppress(redis.ConnectionError), self.admin(server) as client:
                limit = 0 if used is None else int(client.info("memory")["used_memory"] * used)
                client.config_set("maxmemory", limit)

    def close(self) -> None:
        """End both servers and the proxy."""
        self.proxy.close()
        self.primary.close()
        self.replica.close()

    def _follow(self, replica: Server, primary: Server) -> None:
        with self.admin(replica) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", primary.port)

    def _replicated(self) -> float:
        """Return a time until which the replica has all that the primary has done.

        Offsets count within one history: a primary that was restarted begins another one, and the
        replica tells its offset in the old one until it has loaded the new data.
        """
        since = time.monotonic()
        with self.admin() as primary, self.admin(self.replica) as replica:
            written = primary.info("replication")
            until = since + _FAILOVER_S
            while not _has(replica.info("replication"), written):
                assert time.monotonic() < until, "the replica does not follow the primary"
                time.sleep(0.002)
        return since

    def _leads(self, server: Server) -> bool:
        with self.admin(server) as client:
            return bool(client.info("replication")["role"] == "master")

    def _swap(self) -> None:
        self.primary, self.replica = self.replica, self.primary
        self.proxy.retarget("127.0.0.1", self.primary.port)


def _has(replica: Mapping[str, Any], primary: Mapping[str, Any]) -> bool:
    """Return whether a replica has all of a primary, from what both say of their replication."""
    behind = primary["master_repl_offset"] - replica["slave_repl_offset"]
    return _follows(replica, primary) and behind <= 0


def _follows(replica: Mapping[str, Any], primary: Mapping[str, Any]) -> bool:
    same_history = replica["master_replid"] == primary["master_replid"]
    return same_history and replica.get("master_link_status") == "up"
