"""`redrb settings`: the settings of a recipe, with the origin of each value."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redrb.cli.arguments import Commands, add_flag
from redrb.cli.output import show, table
from redrb.options import has_password, shown

if TYPE_CHECKING:
    from redrb.recipe.command_line import Parsed

HELP = "show the settings of a recipe, each with its value and the origin of it"


def add_to(commands: Commands) -> None:
    """Add the command's line of help; `main` reads its arguments."""
    commands.add_parser("settings", help=HELP, add_help=False)


def main(words: Sequence[str]) -> int:
    """Run the command; its flags are those of the recipe."""
    from redrb.recipe.command_line import parse

    parsed = parse("redrb settings", HELP, words, extend=_extend)
    rows = rows_of(parsed)
    cells = [[row["name"], shown(row["value"]), row["origin"], row["help"]] for row in rows]
    head = ("SETTING", "VALUE", "ORIGIN", "MEANING")
    show(rows, [table(head, cells, left=head)], as_json=parsed.options.json)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return a parser with the flags that the command has with any recipe."""
    from redrb.recipe.command_line import general_parser

    return general_parser("redrb settings", HELP, extend=_extend)


def rows_of(parsed: Parsed) -> list[dict[str, Any]]:
    """Return name, value, origin and text of each setting; passwords in URLs are hidden."""
    from redrb.recipe.settings import settings_of

    rows = []
    for name, item in settings_of(type(parsed.recipe)).items():
        value = getattr(parsed.recipe, name)
        if isinstance(value, str) and has_password(value):
            value = without_password(value)
        origin, text = parsed.origins[name], item.metadata["help"]
        rows.append({"name": name, "value": value, "origin": origin, "help": text})
    return rows


def without_password(url: str) -> str:
    """Return a URL with asterisks for its passwords."""
    scheme, _, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    user = login.partition(":")[0]
    hidden = f"{scheme}://{user}:***@{place}" if at else url
    return re.sub(r"([?&]\w*password=)[^&]*", r"\1***", hidden)


def _extend(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--json", "print JSON")
