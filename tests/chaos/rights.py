"""Checks of rights to begin groups, and of the counters of groups in parts."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

Counters = Mapping[str, int]


@dataclass(frozen=True)
class Admitted:
    """Groups that were put with a right.

    Attributes:
        surely: The put had one, if the group is stored.
        maybe: The put may have had one.
    """

    surely: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)


def check_balance(rights: Counters, parts: Counters) -> list[str]:
    """Return findings about counters of one moment."""
    findings = []
    if rights["granted"] != sum(rights[name] for name in ("used", "returned", "lost", "held")):
        findings.append(f"rights are not balanced: {rights}")
    if parts["begun"] != sum(
        parts[name] for name in ("incomplete", "completed", "delivered", "dropped", "dead")
    ):
        findings.append(f"groups in parts are not balanced: {parts}")
    return findings


def check_end(
    rights: Counters, parts: Counters, admitted: Admitted, stored: Set[str], vanished: Set[str]
) -> list[str]:
    """Return findings about a task that nobody uses any more.

    Args:
        rights: Its rights.
        parts: Its groups in parts.
        admitted: Its groups that were put with a right.
        stored: Its groups that were ever stored.
        vanished: Those of them that a failover may have taken back.
    """
    findings = []
    if rights["held"]:
        findings.append(f"{rights['held']} rights are held by nobody: {rights}")
    if parts["incomplete"] or parts["delivered"] or parts["dead"]:
        findings.append(f"groups in parts are left, or were put without all parts: {parts}")
    counted = rights["used"] + rights["late"]
    least = len(admitted.surely & stored - vanished)
    most = len((admitted.surely | admitted.maybe) & stored)
    if not least <= counted <= most:
        findings.append(f"{counted} groups were put with a right, journals say {least} to {most}")
    return findings
