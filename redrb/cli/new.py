"""`redrb new`: writes a first recipe."""

from __future__ import annotations

import argparse
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from redrb.checks import install_command
from redrb.cli.arguments import Commands, add_json
from redrb.cli.output import show
from redrb.errors import ConfigError

KINDS = ("grpo", "ppo", "plain")


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("new", help="write a first recipe, which runs unchanged")
    parser.add_argument("kind", choices=KINDS, help="plain: your own algorithm")
    parser.add_argument("file", type=Path, help="file to write, such as my_recipe.py")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    file: Path = options.file
    if file.suffix != ".py":
        raise ConfigError(f"{file} must end with .py.")
    template = "plain" if options.kind == "plain" else "grpo"
    starter = (files("redrb.recipe.starters") / f"{template}.py").read_text(encoding="utf-8")
    if options.kind == "ppo":  # it has two networks that learn
        starter = starter.replace("GRPO", "PPO")
        for rate in re.findall(r"    learning_rate = .*\n", starter):
            both = [rate.replace("learning", f"{each}_learning") for each in ("actor", "critic")]
            starter = starter.replace(rate, "".join(both))
    # runs of recipes with the same name share a folder, so the class is named after the file
    words = re.split(r"[^0-9A-Za-z]+", file.stem)
    name = "".join(word[:1].upper() + word[1:] for word in words)
    if not name or name[0].isdigit():
        name = "MyRecipe"
    elif re.search(rf"\b{name}\b", starter):
        name = f"{name}Job"
    text = starter.replace("class MyRecipe(", f"class {name}(")
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already, and is not overwritten.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}.") from error
    result = {"file": str(file), "kind": options.kind}
    lines = [f"{file} is written. Run it: redrb run {file}"]
    if "transformers" in starter and find_spec("transformers") is None:
        lines.append(f"It needs transformers first: {install_command('recipes')}")
    show(result, lines, as_json=options.json)
    return 0
