"""`redrb doctor`: checks servers, tasks and weights, says what helps, and mends what is safe."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from redrb.cli.arguments import Commands, add_command, add_flag
from redrb.cli.watching import add_watch
from redrb.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from redrb.watch.doctor.checkup import Report
    from redrb.watch.state.model import Finding, Severity

_TEXT = (
    "check servers, tasks, tables and weights, and say what helps. It looks at the connection, the "
    "server's settings, workers, leases, ledgers, staleness, dead letters, and at what dead "
    "processes have left. docs/reference/findings.md lists all findings."
)
_STATUS = (
    "Exit status: 0 when nothing was found at or above --fail-on; 1 when something was, such as a "
    "Redis that does not answer; 2 when an argument is wrong, or the user may not look."
)
_WATCH_S = 10.0
_SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "doctor", _TEXT, _run, subject=None)
    parser.epilog = _STATUS
    parser.add_argument(
        "task",
        metavar="TASK",
        nargs="?",
        default="",
        help="check this task or table, and the servers, only",
    )
    add_flag(
        parser,
        "--repair",
        "mend what is safe to mend, and say what was done; experience is never deleted",
    )
    parser.add_argument(
        "--fail-on",
        choices=_SEVERITIES,
        default=_SEVERITIES[0],
        help="least severity for exit status 1 (default: critical)",
    )
    parser.add_argument(
        "--over",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="time between two looks, at least 0.2 for rates such as of dead letters (default: 1)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="longest time for all checks (default: 10); a repair may wait for a lease besides",
    )
    add_watch(parser, default_s=_WATCH_S, look_s=None)


def _run(options: argparse.Namespace) -> int:
    from redrb.checks import checked_number
    from redrb.cli.output import show
    from redrb.watch.doctor.checkup import report_on

    for name in ("over", "timeout"):
        if checked_number(name, getattr(options, name)) <= 0:
            raise ConfigError(f"--{name}={getattr(options, name):g}: give seconds above 0.")
    try:
        report = report_on(
            options.url,
            options.namespace,
            options.task,
            repairing=options.repair,
            over_s=options.over,
            timeout_s=options.timeout,
        )
    except StoreError as error:
        raise ConfigError(f"could not check: {error}") from error
    show(_record(report), _lines(report, options.task), as_json=options.json)
    failing = _SEVERITIES[: _SEVERITIES.index(options.fail_on) + 1]
    return int(any(finding.severity in failing for finding in report.findings))


def _record(report: Report) -> dict[str, object]:
    state = report.state
    return {
        "worst": report.findings[0].severity if report.findings else None,
        "findings": list(map(asdict, report.findings)),
        "repairs": list(map(asdict, report.repairs)),
        "servers": list(map(asdict, report.pings)),
        "namespace": state.namespace if state else None,
        "where": state.where if state else None,
        "time": state.time if state else None,
    }


def _lines(report: Report, only: str) -> Iterator[str]:
    from redrb.registry import elsewhere
    from redrb.watch.state.findings.wording import listed

    for ping in report.pings:
        yield (
            f"server {ping.server}: median reply {ping.median_s * 1e3:.1f} ms, slowest "
            f"{ping.worst_s * 1e3:.1f} ms, clock {ping.skew_s:+.2f} s"
        )
    if report.state is not None and only:
        yield f"namespace {report.state.namespace}: {only} only"
    elif report.state is not None:
        tasks = listed([task.name for task in report.state.tasks]) or "none"
        weights = listed([one.name for one in report.state.weights]) or "none"
        tables = listed([one.name for one in report.state.tables])
        tables = f"; tables {tables}" if tables else ""
        empty = (tasks, tables, weights) == ("none", "", "none")
        more = f"; {elsewhere(report.state.others)}" if empty else ""
        yield f"namespace {report.state.namespace}: tasks {tasks}{tables}; weights {weights}{more}"
    for repair in report.repairs:
        outcome = "REPAIRED" if repair.done else "NOT REPAIRED"
        yield ""
        yield f"{outcome} {repair.code}: {repair.subject}: {repair.summary}"
    for finding in report.findings:
        yield from _described(finding)
    numbers = Counter(finding.severity for finding in report.findings)
    found = ", ".join(f"{numbers[name]:,} {name}" for name in _SEVERITIES if numbers[name])
    yield ""
    yield f"found: {found or 'no trouble'}"


def _wrapped(text: str) -> list[str]:
    """Return the lines of an indented text: as wide as the terminal, or one where there is none."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else len(text) + 2
    return textwrap.wrap(
        text, max(width, 20), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


def _described(finding: Finding) -> Iterator[str]:
    yield ""
    yield f"{finding.severity.upper()} {finding.code}: {finding.subject}"
    yield from _wrapped(finding.summary)
    yield from _wrapped(f"Cause: {finding.cause}")
    if finding.command:
        yield f"  Run: {finding.command}"
