"""Checks that the command of a finding can be run as it is printed."""

from __future__ import annotations

import shlex
from typing import Any

from redrb.cli.__main__ import _parser
from redrb.cli.processes import stage
from redrb.recipe.command_line import general_parser
from redrb.watch.state.model import Finding

OF_SYSTEM = {"cat", "curl", "echo", "kill", "pip", "ps", "timedatectl"}
WITHOUT_URL = {"acl"}


def check_command(finding: Finding, *, namespace: str, url: str) -> None:
    """Check that a command parses, and that one of redrb names the namespace and the URL."""
    words = shlex.split(finding.command)
    assert words, f"{finding.code} has no command"
    by_variable = words[0].startswith("REDRB_URL=")
    program, *words = words[1:] if by_variable else words
    if program in ("redis-cli", "valkey-cli"):
        assert words[0] in ("-h", "-s"), finding
    elif program.startswith("redrb"):
        options = _options(program, words)
        assert options.namespace == namespace, finding
        assert by_variable or words[0] in WITHOUT_URL or options.url == url, finding
        assert words[0] != "set" or any("=" in word for word in options.settings), finding
    else:
        assert program in OF_SYSTEM, finding


def _options(program: str, words: list[str]) -> Any:
    if program == "redrb":
        return _parser().parse_args(words)
    parser = stage.parser() if program == "redrb-stage" else general_parser(program, "")
    return parser.parse_args(words)
