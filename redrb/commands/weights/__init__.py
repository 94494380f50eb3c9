"""`redrb weights`: commands for published weights, one module each.

`redrb/weights/inspection` does the work; these modules parse arguments and print results.
"""

from __future__ import annotations

from redrb.commands.arguments import STATUS, Commands
from redrb.commands.weights import get, ls, put, rm, show


def add_to(commands: Commands) -> None:
    """Add the command `weights` and its commands."""
    parser = commands.add_parser(
        "weights", help="look at published weights, get, put and delete them", epilog=STATUS
    )
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (ls, show, get, put, rm):
        command.add_to(subcommands)
