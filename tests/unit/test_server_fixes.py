"""Versions of servers, and the security faults that doctor names for them."""

from __future__ import annotations

import re

import pytest

from redrb.watch.doctor import server_fixes
from redrb.watch.state.model import ServerState

IN_MAY = {"23479", "23631", "25243"}
OF_REDIS = {*IN_MAY, "66373", "81934"}


def found(kind: str, version: str) -> tuple[str, set[str], str]:
    """Return code, faults and advice; "" where there is no finding."""
    for finding in server_fixes.find(ServerState("h:1", kind, version)):
        numbers = set(re.findall(r"CVE-2026-(\d+)", finding.summary))
        return finding.code, numbers, finding.summary.rpartition("upgrade to ")[2]
    return "", set(), ""


@pytest.mark.parametrize(
    ("kind", "version", "faults", "advice"),
    [
        ("redis", "8.2.5", OF_REDIS, "8.2.9 or newer."),
        ("redis", "8.2.6", {"66373", "81934"}, "8.2.9 or newer."),
        ("redis", "8.4.5", {"81934"}, "8.4.6 or newer."),
        ("redis", "8.3.1", OF_REDIS, "8.4.6 or newer."),  # no release of this line has the fixes
        ("redis", "8.8.0", {"81934"}, "8.8.2 or newer."),
        ("redis", "8.10.0", {"81934"}, "8.10.1 or newer."),
        ("valkey", "9.0.3", {*OF_REDIS, "63639", "56684"}, "9.0.5 or newer."),
        ("valkey", "9.1.0", {"66373", "81934", "63639", "56684"}, "9.1.1 or newer."),
    ],
)
def test_servers_below_a_fix(kind, version, faults, advice):
    assert found(kind, version) == ("below-security-fixes", faults, advice)


@pytest.mark.parametrize(
    ("kind", "version", "faults", "advice"),
    [
        ("redis", "7.0.15", OF_REDIS - {"23479"}, "7.2.16 or newer."),  # 7.2 brought that fault
        ("redis", "7.2.14", {"66373", "81934"}, "7.2.16 or newer."),
        ("redis", "8.0.6", OF_REDIS, "8.2.9 or newer."),
        ("valkey", "8.1.8", {"66373", "81934", "63639", "56684"}, "8.1.9 or newer."),
    ],
)
def test_versions_that_distributions_patch(kind, version, faults, advice):
    assert found(kind, version) == ("unknown-security-fixes", faults, advice)
    [finding] = server_fixes.find(ServerState("h:1", kind, version))
    assert "check that your distribution's update is in" in finding.summary


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        *(("redis", each) for each in ("7.2.16", "8.2.9", "8.8.2", "8.10.1", "8.12.0", "9.0.0")),
        *(("valkey", each) for each in ("7.2.14", "8.0.11", "8.1.9", "9.0.6", "9.1.2", "9.2.0")),
        ("redis", "unstable"),
    ],
)
def test_servers_with_all_fixes(kind, version):
    assert found(kind, version) == ("", set(), "")
