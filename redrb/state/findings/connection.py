"""The finding of a look that failed: Redis is away, or refuses the user."""

from __future__ import annotations

from redrb.state.finding import Finding, FindingKind
from redrb.state.findings.wording import url_command

CONNECTION = FindingKind(
    "connection",
    "critical",
    "Redis has stopped, is overloaded, or cannot be reached from this machine; or the URL or the "
    "password is wrong. Makers and trainers wait until Redis is back, for as long as their retries "
    "allow.",
)
KINDS = (CONNECTION,)


def connection_finding(where: str, error: str, url: str | None = None) -> Finding:
    """Return the finding of a look that failed.

    Args:
        where: Where Redis is, without a password.
        error: Why the look failed.
        url: URL of Redis, whose user and TLS the command needs; None: `where` is enough.
    """
    command = url_command(url, where, "PING")
    return CONNECTION.found("server", f"{where} could not be read: {error}", command)
