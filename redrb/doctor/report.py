"""`report_on`: connects, checks, repairs and checks again; a server that is away is a finding."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from redrb import environment
from redrb.connection import Client, connect
from redrb.connection.deadline import Deadline
from redrb.doctor.checkup import Checkup, check_up
from redrb.doctor.latency import Ping
from redrb.doctor.repairs import Repair, repair
from redrb.doctor.server_facts import find_in_cluster
from redrb.errors import StoreError, StoreUnavailable, UnsupportedServer
from redrb.state.findings import connection_finding
from redrb.state.findings.servers import OLD_SERVER
from redrb.state.findings.wording import shown, url_command
from redrb.state.model import Finding, State
from redrb.state.reader import StateReader

_CONNECT_S = 5.0
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Report:
    """What doctor found and did.

    Attributes:
        findings: The troubles, the worst first; after repairs, those that remain.
        repairs: What was mended, or could not be.
        state: The state of the namespace, or of the one task; None if Redis is away.
    """

    findings: tuple[Finding, ...]
    repairs: tuple[Repair, ...] = ()
    pings: tuple[Ping, ...] = ()
    state: State | None = None


def report_on(
    url: str | None,
    namespace: str,
    task: str = "",
    *,
    repairing: bool = False,
    over_s: float = 1.0,
    timeout_s: float = 10.0,
) -> Report:
    """Check a namespace, or one of its tasks, and its servers.

    Args:
        url: Where Redis is; None: as `redrb.connect` finds it.
        namespace: The namespace.
        task: The task; "": all tasks and weights.
        repairing: Whether to mend what is safe to mend.
        over_s: Seconds between two looks, for rates.
        timeout_s: Most seconds for all checks. Repairs may wait for a lease besides.

    Raises:
        ConfigError: The URL or a name is wrong, or there is no such task.
        StoreDenied: The user may not log in, or may not even look.
    """
    url = url or environment.variable(environment.URL)
    try:
        with Deadline(at_most=timeout_s):
            client = connect(
                url, connect_timeout=min(timeout_s, _CONNECT_S), retry_s=0, allow_eviction=True
            )
    except StoreUnavailable as error:
        return Report((_away(error, url),))
    except UnsupportedServer as error:
        return Report((_too_old(error, url),))
    repairs: list[Repair] = []
    with client:
        try:
            found = _checked(client, namespace, task, over_s, timeout_s)
            if repairing:
                for each in repair(client, found.state, found.examined, found.left_names):
                    repairs.append(each)
                if repairs:
                    found = _checked(client, namespace, task, over_s, timeout_s)
        except StoreUnavailable as error:
            return Report((_away(error, client.url), *_slots(client)), tuple(repairs))
    return Report(found.findings, tuple(repairs), found.pings, found.state)


def _away(error: StoreUnavailable, url: str | None) -> Finding:
    return connection_finding(shown(error.where), shown(str(error), longest=_LONGEST), url)


def _too_old(error: UnsupportedServer, url: str | None) -> Finding:
    """Return the finding of a server that redrb refuses to work with."""
    command = url_command(url, "localhost:6379", "INFO", "server")
    return OLD_SERVER.found("server", shown(str(error), longest=_LONGEST), command)


def _slots(client: Client) -> tuple[Finding, ...]:
    """Return findings about a cluster that answers, and serves nobody as slots are missing."""
    try:
        with Deadline(at_most=_CONNECT_S):
            return tuple(find_in_cluster(client))
    except StoreError:
        return ()


def _checked(client: Client, namespace: str, task: str, over_s: float, timeout_s: float) -> Checkup:
    reader = StateReader(client, namespace, task=task or None)

    def look() -> State:  # the second state has rates
        reader.look()
        threading.Event().wait(over_s)
        return reader.look()

    with Deadline(at_most=timeout_s + over_s):
        return check_up(client, namespace, look, task)
