"""`redrb acl`: prints the permissions that a role needs in Redis, or gives them to a user."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from redrb import environment
from redrb.cli.arguments import ROLES, STATUS, Commands, add_flag, add_json
from redrb.cli.output import show
from redrb.options import UrlFlag, variable_of

if TYPE_CHECKING:
    from redrb.connection import Client
    from redrb.watch.doctor.servers import Kept

PASSWORD = "REDRB_USER_PASSWORD"  # noqa: S105 (the name of a variable)
"""A password that `--apply` gives to the user."""

_TEXT = (
    "Print the command ACL SETUSER that gives a user of Redis the fewest permissions that a role "
    "needs, or run it with --apply. It replaces the permissions that the user had, and leaves its "
    f"passwords as they are: --apply adds that of {PASSWORD}; else give a new user one with "
    "`ACL SETUSER NAME >PASSWORD`. Users are gone when Redis restarts, unless ACL SAVE (with an "
    "aclfile) or CONFIG REWRITE was run after the last change. Run this again after an upgrade of "
    "redrb. Without --apply it needs no connection. docs/reference/security.md says what each role "
    "can do."
)
_LOST = (
    "the user is gone when Redis restarts: after the last change run ACL SAVE (with an aclfile) or "
    "CONFIG REWRITE on each server, replicas too; --apply runs ACL SAVE"
)
_DROPS = (
    "a restart of this server will lose all data, since it reads its file with the rights of the "
    "user default: give it `ACL SETUSER default off allcommands allkeys allchannels`, then ACL SAVE"
)
_OF_SERVERS: dict[Kept, str] = {
    "aclfile": "saved in its aclfile",
    "config": "gone when the server restarts, unless you run CONFIG REWRITE there now",
    "memory": "gone when the server restarts: it has no aclfile and no file of settings",
}


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "acl",
        help="print the permissions that a role needs in Redis",
        description=_TEXT,
        epilog=STATUS,
    )
    parser.add_argument("--role", required=True, choices=ROLES, help="what the user does")
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        help="name of its task, several times for several tasks; `math@*` stands for all shards of "
        "a stream; an observer without it sees all tasks, tables and weights of the namespace",
    )
    parser.add_argument(
        "--table",
        action="append",
        default=[],
        help="name of its table, also several times; with the tasks that claim its rows",
    )
    parser.add_argument("--namespace", default="default", help="its namespace (default: default)")
    parser.add_argument(
        "--weights",
        help="weights that it reads, or publishes as a trainer; all that a weight-reader reaches",
    )
    parser.add_argument(
        "--to", metavar="TASK", help="task that a stage forwards groups to, as its maker"
    )
    parser.add_argument("--user", help="name of the user in Redis (default: ROLE)")
    add_flag(
        parser,
        "--apply",
        "make the user on all primaries, and save it where a server has an aclfile",
    )
    parser.add_argument(
        "--url",
        action=UrlFlag,
        help="with --apply: where Redis is, for a user that may run ACL; with a password only in "
        f"{variable_of('url')}, the default",
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from redrb.cli.roles import permissions
    from redrb.keys import check_name

    user = check_name("user", options.user or options.role)
    rules = permissions(
        options.role,
        options.task,
        options.namespace,
        options.weights,
        options.to,
        options.table,
    )
    command = f"ACL SETUSER {user} on {rules}"
    result = {"user": user, "rules": rules.split(), "command": command}
    if not options.apply:
        show(result, [command], as_json=options.json)
        print(f"redrb: {_LOST}", file=sys.stderr)
        return 0
    from redrb.connection import connect
    from redrb.watch.doctor.servers import info_of, lacking_rights

    with connect(options.url) as client:
        kept = dict(_applied(client, command.split()))
        for server in client.primaries():
            if lacking_rights(server, info_of(server)):
                print(f"redrb: {server.where}: {_DROPS}", file=sys.stderr)
    lines = [f"user {user} at {where}: {_OF_SERVERS[how]}" for where, how in kept.items()]
    show(result | {"servers": kept}, lines, as_json=options.json)
    return 0


def _applied(client: Client, command: Sequence[str]) -> Iterator[tuple[str, Kept]]:
    from redrb.watch.doctor.servers import kept_in

    password = environment.variable(PASSWORD)
    for server in client.primaries():
        server.execute(*command, *([f">{password}"] if password else []))
        kept = kept_in(server)
        if kept == "aclfile":
            server.execute("ACL", "SAVE")
        yield server.where, kept
