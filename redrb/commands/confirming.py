"""Asks a person at a terminal before a command deletes something."""

from __future__ import annotations

import argparse
import sys

from redrb.errors import ConfigError


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the option that answers the question beforehand."""
    parser.add_argument("--yes", action="store_true", help="delete without asking")


def confirmed(question: str, *, yes: bool) -> bool:
    """Return whether to go on.

    Raises:
        ConfigError: There is no terminal to ask at, and `yes` is not given.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError("nothing is deleted: give --yes, or answer at a terminal.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
