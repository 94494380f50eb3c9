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

KINDS = ("grpo", "ppo", "plain", "agent")


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "new",
        help="write a first recipe, which runs unchanged",
        description="Write a first recipe, which runs unchanged: on a small model, or with --model "
        "and --dataset on a real one.",
    )
    parser.add_argument(
        "kind",
        choices=KINDS,
        help="plain: your own algorithm; agent: a vLLM samples for a harness with a tool",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="file to write (default: my_recipe.py)",
    )
    real = parser.add_argument_group("a real model (grpo, agent)")
    real.add_argument("--model", help="folder, or name of Hugging Face")
    real.add_argument(
        "--dataset", help="file of JSON lines, or NAME[:CONFIGURATION] of Hugging Face"
    )
    real.add_argument(
        "--engine",
        choices=("vllm", "sglang", "local"),
        help="what samples: a server, or the makers' own copies of the model (default: vllm)",
    )
    real.add_argument(
        "--reward",
        choices=("boxed", "exact", "tests"),
        help="1 for the right answer in \\boxed{}, for an answer and nothing else, or for code "
        "that passes unit tests (default: tests if the file has a column of tests, else boxed)",
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    file: Path = options.file or Path("my_recipe.py")
    if file.suffix != ".py":
        raise ConfigError(f"{file} must end with .py.")
    is_agent = options.kind == "agent"
    is_real = is_agent or any((options.model, options.dataset, options.engine, options.reward))
    if is_agent:
        if options.reward:
            raise ConfigError(
                "leave --reward out: an agent returns its reward itself, at the end of agent() in "
                f"{file}."
            )
        if options.engine not in (None, "vllm"):
            raise ConfigError("leave --engine out: only vLLM samples for agents.")
        from redrb.cli.new_real import agent_recipe
        from redrb.recipe.rows import FILES

        starter = agent_recipe(options, file)
    elif is_real:
        if options.kind != "grpo" or not options.model or not options.dataset:
            raise ConfigError("a recipe for a real model is: redrb new grpo --model --dataset.")
        from redrb.cli.new_real import real_recipe
        from redrb.recipe.rows import FILES

        starter = real_recipe(options, file)
    else:
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
    elif re.search(rf"\b{name}\b", starter.replace("class MyRecipe(", "")):
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
    start = (
        "The text at its beginning says how it is run." if is_real else f"Run it: redrb run {file}"
    )
    lines = [f"{file} is written. {start}"]
    extras = {"transformers": "recipes"} if "transformers" in starter else {}
    if is_real:
        extras = {"transformers": "recipes", "accelerate": "accelerate"}
        extras |= {} if options.engine == "local" else {"aiohttp": "engines"}
        extras |= {"starlette": "dashboard"} if is_agent else {}
        extras |= {} if (options.dataset or FILES[0]).endswith(FILES) else {"datasets": "data"}
    for package, extra in extras.items():
        if find_spec(package) is None:
            lines.append(f"It needs {package} first: {install_command(extra)}")
    show(result, lines, as_json=options.json)
    return 0
