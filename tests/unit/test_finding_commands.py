"""The commands of findings: they can be run as printed, and reach the same server and namespace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from redrb.connection.server_cli import cli_words
from redrb.watch.state.findings import connection_finding, findings_of
from redrb.watch.state.findings.wording import worker_command
from redrb.watch.state.model import State
from tests.finding_commands import check_command
from tests.troubled_states import (
    TROUBLES,
    only,
    with_server,
    with_stats,
    with_task,
)

URL = "redis://looks@h:1/0?client_name=a b"


@pytest.mark.parametrize("code", TROUBLES)
def test_each_finding_has_a_command_that_can_be_run(code: str) -> None:
    for state in (TROUBLES[code](), with_unknown_processes(TROUBLES[code]())):
        state = replace(state, namespace="lab", url=URL)
        for finding in findings_of(state):
            check_command(finding, namespace="lab", url=URL)


def with_unknown_processes(state: State) -> State:
    tasks = (
        replace(task, workers=tuple(replace(worker, pid=0) for worker in task.workers))
        for task in state.tasks
    )
    return replace(state, tasks=tuple(tasks))


def test_groups_of_another_consumer_group_need_another_program() -> None:
    state = only("maker")
    [task] = state.tasks
    for kind, one in (("nobody-takes", state), ("idle-task", only("stage"))):
        [task] = one.tasks
        groups = (replace(task.groups[0], name="a b"),)
        [found] = findings_of(replace(one, tasks=(replace(task, groups=groups),)))
        assert found.code == kind
        assert found.command == "redrb stats math '--group=a b'"
        assert "drop_group()" in found.cause or kind == "idle-task"


def test_rows_that_nobody_claims_need_another_program_or_none() -> None:
    [found] = findings_of(TROUBLES["unclaimed-rows"]())
    assert (found.subject, found.command) == (
        "task train:math",
        "redrb stats train:math --group=default",
    )
    assert "no process claims them" in found.summary
    assert "`redrb rm TABLE:TASK` unregisters it" in found.cause
    assert "redrb-trainer" not in found.cause


def test_a_limit_below_a_batch_is_removed_before_a_trainer_is_started() -> None:
    state = with_stats(TROUBLES["blocked-makers"](), limit=4)
    for groups, command in (("4", "redrb-trainer"), ("5", "redrb set math limit=none")):
        task = replace(state.tasks[0], settings={"groups_per_version": groups})
        [found] = findings_of(replace(state, tasks=(task,)))
        assert found.code == "blocked-makers"
        assert found.command.startswith(command)
        assert ("no batch is ever full" in found.summary) == (groups == "5")


def test_expiring_groups_are_bounded_or_may_be_staler() -> None:
    expiring = TROUBLES["expiring-groups"]()
    [found] = findings_of(expiring)
    assert found.command == "redrb set math max_staleness=5"
    [task] = expiring.tasks
    task = replace(task, settings={"max_staleness": "4"})
    [found] = findings_of(replace(expiring, tasks=(task,)))
    assert found.command == "redrb set math groups_per_version=GROUPS"


def test_a_full_task_gets_twice_its_limit() -> None:
    for settings, change in (
        ({"limit": "8"}, "set math limit=16"),
        ({"max_bytes": "64"}, "set math max_bytes=128"),
        ({}, "stats math"),
    ):
        state = with_stats(with_task(settings=settings), producers_waiting=3)
        assert findings_of(state)[0].command == f"redrb {change}"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h", "-h h -p 6379"),
        ("rediss://:secret@h:7/2", "-h h -p 7 --askpass --tls"),
        ("rediss://me:secret@h?ssl_ca_certs=/c%20a.pem", "-h h -p 6379 --user me --askpass --tls"),
        ("rediss://h?ssl_cert_reqs=none&ssl_ca_path=/ca", "--tls --insecure --cacertdir /ca"),
        ("rediss://h?ssl_certfile=/c.pem", "--tls --cert /c.pem --key /c.pem"),
        ("rediss://h?ssl_certfile=/c&ssl_keyfile=/k", "--tls --cert /c --key /k"),
        ("rediss://h?ssl_ca_data=secret", "--tls --cacert CA_FILE"),
        ("unix://me:secret@/run/a.sock", "-s /run/a.sock --user me --askpass"),
        ("rediss+cluster://me:secret@a:1,b:2", "-h a -p 1 --user me --askpass --tls"),
        ("embedded:///data", ""),
    ],
)
def test_redis_cli_gets_user_and_tls_and_no_password(url: str, words: str) -> None:
    given = cli_words(url, "PING")
    assert words in " ".join(given)
    assert given[-1:] in (("PING",), ())
    assert "secret" not in connection_finding("where", "timed out", url).command


def test_redis_cli_asks_for_no_password_that_the_environment_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REDISCLI_AUTH", "secret")
    assert cli_words("redis://me:secret@h", "PING") == (
        "-h",
        "h",
        "-p",
        "6379",
        "--user",
        "me",
        "PING",
    )


def test_sentinels_are_asked_for_the_primary() -> None:
    url = "rediss+sentinel://me:secret@a:1,b:2/main/0?sentinel_username=s&sentinel_password=secret"
    command = connection_finding("main/0 of the Sentinels a:1,b:2", "timed out", url).command
    assert command == "redis-cli -h a -p 1 --user s --askpass --tls SENTINEL MASTER main"


def test_commands_name_the_namespace_and_the_server() -> None:
    state = replace(with_stats(dead_letters=4), namespace="lab")
    assert findings_of(state)[0].command == "redrb dead ls math --namespace lab"
    server = with_server(kind="valkey", address="/run/a b.sock", maxmemory_policy="allkeys-lru")
    command = "valkey-cli -s '/run/a b.sock' CONFIG SET maxmemory-policy noeviction"
    assert findings_of(server)[0].command == command
    server = with_server(cli=("-h", "h", "--tls"), maxmemory_policy="allkeys-lru")
    command = "redis-cli -h h --tls CONFIG SET maxmemory-policy noeviction"
    assert findings_of(server)[0].command == command


def test_workers_are_started_on_the_task_and_namespace_that_lack_them() -> None:
    starved = replace(only("trainer", waits_for="batch", waits_s=12.0), namespace="lab")
    [found] = findings_of(starved)
    assert found.command == "redrb-maker RECIPE --task math --namespace lab"
    command = worker_command(starved, starved.tasks[0], "stage")
    assert command == "redrb-stage MODULE:FUNCTION --from TASK --to TASK --namespace lab"
