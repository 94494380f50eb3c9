"""`redrb demo`: trains a small policy on this machine."""

from __future__ import annotations

import argparse

from redrb.commands.arguments import Commands
from redrb.launch.settings import DemoSettings
from redrb.options import add_options, settings_from


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "demo", help="train a small policy with makers and a trainer on this machine"
    )
    add_options(parser, DemoSettings)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from redrb.commands.top import job_screen
    from redrb.launch.demo import run_demo

    settings = settings_from(options, DemoSettings)
    return run_demo(settings, as_json=options.json, show=job_screen())
