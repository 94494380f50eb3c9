"""`redrb acl`: prints the rights that a role needs in Redis."""

from __future__ import annotations

import argparse

from redrb.commands.arguments import ROLES, STATUS, Commands, add_json
from redrb.commands.output import show

_TEXT = (
    "Print the command ACL SETUSER that gives a user of Redis the fewest rights that a role needs. "
    "It replaces the rights that the user had, and leaves its passwords as they are: give a new "
    "user one with `ACL SETUSER NAME >PASSWORD`. Run it again after an upgrade of redrb. It needs "
    "no connection. docs/security.md says what each role can do."
)


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "acl", help="print the rights that a role needs in Redis", description=_TEXT, epilog=STATUS
    )
    parser.add_argument("--role", required=True, choices=ROLES, help="what the user does")
    parser.add_argument(
        "--task",
        help="name of its task; an observer without it sees all tasks and weights of the namespace",
    )
    parser.add_argument("--namespace", default="default", help="its namespace (default: default)")
    parser.add_argument("--weights", help="weights that it reads, or publishes as a trainer")
    parser.add_argument(
        "--to", metavar="TASK", help="task that a stage forwards groups to, as its maker"
    )
    parser.add_argument("--user", help="name of the user in Redis (default: ROLE)")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from redrb.commands.roles import rights
    from redrb.keys import check_name

    user = check_name("user", options.user or options.role)
    rules = rights(options.role, options.task, options.namespace, options.weights, to=options.to)
    command = f"ACL SETUSER {user} on {rules}"
    result = {"user": user, "rules": rules.split(), "command": command}
    show(result, [command], as_json=options.json)
    return 0
