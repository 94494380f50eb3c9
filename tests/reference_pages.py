"""The pages of the reference that are made from code.

`python -m tests.reference_pages` writes them below docs/reference: a page of `api/` for each
module that users import from, a page of `commands/` for each command, and `settings.md`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from redrb import errors
from redrb.cli import __main__ as cli
from redrb.cli import settings as settings_command
from redrb.cli.processes import stage
from redrb.cli.processes.maker import __doc__ as maker_text
from redrb.cli.processes.trainer import __doc__ as trainer_text
from redrb.cli.run import command as run_command
from redrb.options import shown
from redrb.recipe import GRPORecipe, PPORecipe, Recipe
from redrb.recipe.command_line import general_parser
from redrb.recipe.job_settings import (
    EngineSettings,
    JobSettings,
    MakerSettings,
    StepSettings,
    TrainerSettings,
)
from redrb.recipe.language import LanguageRecipe
from redrb.recipe.settings import settings_of
from redrb.stream import ExperienceStream, TaskSettings
from redrb.stream.task.settings import SETTINGS
from tests.documents import DOCS
from tests.public_names import MODULES, _own_names

REFERENCE = DOCS / "reference"

MADE = "<!-- Made by `python -m tests.reference_pages` from the texts of the code. -->\n"

ALSO = {
    "errors": " [Cause and remedy of each](../errors.md).",
    "experience": """

A batch is padded with zeros on the left, so that all answers end in the last column:

![Two samples of 7 and 4 tokens in one batch of shape 2 by 7; masks are 0 at the padding](\
../../pictures/padding.svg)""",
}
"""What the page of a module says beside its purpose."""

STREAM = {
    "Put": "put put_many put_part writer discard_filtered discard_expired store_forwarded"
    " store_next",
    "Wait for the right to begin groups": "admit bounded expect advance",
    "Take": "take leases is_fresh join_group consumer dismiss",
    "Look": "count counts stats staleness read dead_letters settings incarnation",
    "Change what is stored": "move update_priority expire requeue drop_dead_letters settle clear",
    "Settings, files and the end": "configure save resume drop_group close",
}
"""The methods of `ExperienceStream`, as its page lists them."""

API = {
    "connect": ("Connect", "Reach a Redis, from any process."),
    "experience": ("Samples and batches", "What makers put and trainers get."),
    "stream": ("Streams", "Put groups into a task, take batches out."),
    "table": ("Tables", "Rows of columns that several processes fill."),
    "weights": ("Weights", "Publish weights, and load them elsewhere."),
    "algorithms": ("Algorithms", "Advantages, losses and steps of PPO and GRPO."),
    "recipe": ("Recipes", "A whole job in one class."),
    "train": ("Makers, trainers and stages", "Loops of workers, and their events."),
    "train.engines": ("Engines", "Makers that sample from vLLM or SGLang."),
    "train.episodes": ("Episodes", "Makers whose samples have several turns."),
    "gateway.client": ("Agents", "Sessions of a gateway for agents."),
    "compat.trl": ("TRL", "TRL's trainers on groups of other processes."),
    "compat.coati": ("Coati", "The names of ColossalAI's Coati."),
    "compat.xtuner": ("XTuner", "The replay buffer of XTuner."),
    "compat.torchrl": ("TorchRL", "A replay buffer of TorchRL on a task."),
    "compat.slime": ("slime", "A data source and a rollout function of slime."),
    "compat.miles": ("miles", "A data source and a data buffer of miles."),
    "compat.verifiers": ("verifiers", "Episodes of verifiers' environments by a gateway."),
    "compat.openai_agents": ("OpenAI Agents SDK", "Runs of its agents by a gateway."),
    "compat.openenv": ("OpenEnv", "Episodes of its environments by a gateway."),
    "compat.transfer_queue": ("TransferQueue", "The interface of verl's TransferQueue."),
    "watch.groups": ("Look at groups", "Read stored groups without taking them."),
    "codec": ("Wire format", "Encode and decode groups."),
    "errors": ("Errors", "Attributes of each error."),
}
"""Pages of api/, in the order of the navigation: module -> title and its first sentence."""

_HOME = {
    "connect": ("connect", "Client"),
    "stream": ("ExperienceLoader", "ExperienceSender", "Mixture", "ShardedStream", "export_task"),
}
"""Names that only the root has, by the page that shows them."""

PREFERRED = ("ExperienceStream", "BufferItem", "Table", "WeightPublisher", "WeightSubscriber")
"""The names that lead their page."""


def pages() -> dict[str, str]:
    """Return the text of each page, by its path below docs/reference."""
    found = {f"api/{name}.md": text for name, text in _api()}
    found |= {f"commands/{name}.md": text for name, text in _commands()}
    return found | {"settings.md": _settings()}


def write() -> None:
    """Write all pages; pages of names that are gone are deleted."""
    made = pages()
    for folder in ("api", "commands"):
        for page in (REFERENCE / folder).glob("*.md"):
            page.unlink()
    for name, text in made.items():
        (REFERENCE / name).parent.mkdir(parents=True, exist_ok=True)
        (REFERENCE / name).write_text(text)


# api/


def names_of(page: str) -> list[str]:
    """Return the names that a page of api/ documents, as users type them."""
    root = importlib.import_module("redrb")
    at_root = {id(getattr(root, name)): name for name in root.__all__}
    if page == "errors":
        every = [name for name, error in vars(errors).items() if _is_error(error)]
        return [f"redrb.errors.{name}" for name in every]
    names = [f"redrb.{name}" for name in _HOME.get(page, ())]
    if page == "connect":
        return names
    module = importlib.import_module(f"redrb.{page}")
    for name in sorted(getattr(module, "__all__", ())) or _own_names(module):
        value = getattr(module, name)
        root_name = at_root.get(id(value))
        names.append(f"redrb.{root_name}" if root_name else f"redrb.{page}.{name}")
    documented = [name for name in names if _is_documented(name)]
    return sorted(documented, key=lambda name: name.rpartition(".")[2] not in PREFERRED)


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _is_documented(name: str) -> bool:
    """Return whether a name is a class or a function, or is described in its module."""
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    return inspect.isclass(value) or inspect.isfunction(value)


def _methods() -> str:
    """Return tables of the methods of `ExperienceStream`, each with the first line of its text."""
    tables = []
    for title, listed in STREAM.items():
        rows = []
        for name in listed.split():
            text = inspect.getdoc(getattr(ExperienceStream, name)) or ""
            link = f"[`{name}`][redrb.ExperienceStream.{name}]"
            rows.append(f"| {link} | {text.splitlines()[0].rstrip('.')} |\n")
        tables.append(f"| {title} | |\n|---|---|\n{''.join(rows)}")
    return "\n".join(tables).rstrip()


def _api() -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    rows = []
    for page, (title, text) in API.items():
        names = [name for name in names_of(page) if name not in seen]
        seen |= set(names)
        listed = "\n".join(f"::: {name}\n" for name in names)
        also = ALSO.get(page, "")
        if page == "stream":
            also = f"\n\n{_methods()}"
        yield page, f"# {title}\n\n{MADE}\n{text}{also}\n\n{listed}"
        short = (f"[`{name.rpartition('.')[2]}`]({page}.md#{name})" for name in names)
        rows.append(f"**[{title}]({page}.md).** {text}\n\n{', '.join(short)}\n\n")
    text = f"# Python\n\n{MADE}\nEvery class and function that programs import.\n\n"
    yield "index", f"{text}{''.join(rows)}".rstrip() + "\n"


# commands/


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by the words that start it."""
    found: dict[str, argparse.ArgumentParser] = {}
    commands = _subcommands(cli._parser())
    commands |= {"run": run_command.parser(), "settings": settings_command.parser()}
    for name, parser in commands.items():
        deeper = _subcommands(parser)
        found |= {f"redrb {name} {each}": deeper[each] for each in deeper}
        if not deeper:
            found[f"redrb {name}"] = parser
    return found | {
        "redrb-maker": general_parser("redrb-maker", maker_text),
        "redrb-trainer": general_parser("redrb-trainer", trainer_text),
        "redrb-stage": stage.parser(),
    }


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _short_texts() -> dict[str, str]:
    """Return the line of each command in the list of `redrb --help`."""
    found = {}
    for words, parser in (("redrb", cli._parser()), *_nested()):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for each in action._choices_actions:
                    found[f"{words} {each.dest}"] = each.help or ""
    return found


def _nested() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for name, parser in _subcommands(cli._parser()).items():
        if _subcommands(parser):
            yield f"redrb {name}", parser


def _commands() -> Iterator[tuple[str, str]]:
    short = _short_texts()
    short["redrb-maker"] = "run a maker of a recipe"
    short["redrb-trainer"] = "run the trainer of a recipe"
    short["redrb-stage"] = "run a stage: take groups, call a function, forward them"
    made = parsers()
    rows = []
    for words, parser in made.items():
        page = words.replace(" ", "-").removeprefix("redrb-") if " " in words else words
        yield page, _page_of_command(words, parser)
        rows.append(f"| [`{words}`]({page}.md) | {_cell(short[words])} |\n")
    status = re.sub(r"\s+", " ", cli._parser().epilog or "")
    table = f"| command | purpose |\n|---|---|\n{''.join(rows)}"
    yield "index", f"# Commands\n\n{MADE}\n{table}\n{_cell(status)}\n"


def _page_of_command(words: str, parser: argparse.ArgumentParser) -> str:
    flags = {flag for action in parser._actions for flag in action.option_strings}
    has_recipe = "--learning-rate" in flags or "--actor-learning-rate" in flags
    of_recipe = {f"--{name.replace('_', '-')}" for name in _recipe_settings() if has_recipe}
    actions = [
        action
        for action in parser._actions
        if not set(action.option_strings) & (of_recipe | {"-h"}) and action.help != "==SUPPRESS=="
    ]
    usage = textwrap.fill(
        " ".join([words, *(form.replace(" ", "\0") for form in _usage(actions))]),
        width=72,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\0", " ")
    parts = [f"# {words}\n\n{MADE}\n"]
    if parser.description:
        parts.append(f"{_text(parser.description)}\n\n")
    parts.append(f"```text\n{usage}\n```\n\n")
    if actions:
        rows = "".join(
            f"| {_form(action)} | {_cell(_help(action, parser), above='../')} |\n"
            for action in actions
        )
        parts.append(f"| argument | meaning |\n|---|---|\n{rows}\n")
    if has_recipe:
        parts.append(
            "Each [setting of the recipe](../settings.md#recipes) is a flag, too: "
            "`learning_rate` is `--learning-rate`.\n\n"
        )
    if parser.epilog:
        parts.append(f"{_text(parser.epilog)}\n")
    return "".join(parts).rstrip() + "\n"


def _usage(actions: Sequence[argparse.Action]) -> Iterator[str]:
    for action in sorted(actions, key=lambda each: not each.option_strings):
        form = _form(action).replace("`", "").replace("\\|", "|")
        required = action.required and action.nargs not in ("*", "?")
        yield form if required else f"[{form}]"


def _form(action: argparse.Action) -> str:
    metavar = action.metavar or (
        "|".join(map(str, action.choices)) if action.choices else action.dest.upper()
    )
    name = metavar[0] if isinstance(metavar, tuple) else str(metavar)
    if not action.option_strings:
        more = " ..." if action.nargs in ("*", "+") else ""
        return f"`{name}{more}`".replace("|", "\\|")
    flag = action.option_strings[-1]
    if action.nargs == 0:
        return f"`{flag}`"
    value = f"[{name}]" if action.nargs == "?" else name
    return f"`{flag} {value}`".replace("|", "\\|")


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = {**vars(action), "prog": parser.prog}
    return (action.help or "") % values


def _text(text: str) -> str:
    paragraphs = (re.sub(r"\s+", " ", each) for each in re.split(r"\n\s*\n", text.strip()))
    return _linked("\n\n".join(paragraphs).replace("<", "&lt;"), "../")


_PAGE = re.compile(r"`?\bdocs/([\w/-]+)\.md(#[\w-]+)?`?")


def _cell(text: str, *, above: str = "") -> str:
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return _linked(text, above)


def _linked(text: str, above: str) -> str:
    """Return a text in which names of pages are links; `above`: the way to docs/reference."""
    return _PAGE.sub(
        lambda page: f"[{page[1].rpartition('/')[2]}]({above}../{page[1]}.md{page[2] or ''})", text
    )


# settings.md

UNITS = {
    "beta": "",
    "clip": "",
    "clip_high": "",
    "critic_learning_rate": "",
    "actor_learning_rate": "",
    "learning_rate": "",
    "entropy_coef": "",
    "gamma": "",
    "kl_coef": "",
    "lam": "",
    "value_clip": "",
    "temperature": "",
    "top_p": "",
    "truncated_importance": "",
    "max_grad_norm": "",
    "target_reward": "",
    "reward_above": "",
    "reward_below": "",
    "overlong_cache": "tokens",
    "seed": "",
    "batch": "groups",
    "checkpoint_every": "versions",
    "evaluate_every": "steps",
    "group_size": "samples",
    "groups": "groups",
    "groups_per_version": "groups",
    "idle_timeout": "s",
    "lease_ms": "ms",
    "lora_rank": "dimensions",
    "limit": "groups",
    "maker_steps": "steps",
    "max_bytes": "bytes",
    "max_dead": "groups",
    "max_deliveries": "deliveries",
    "max_new_tokens": "tokens",
    "max_reads": "reads",
    "max_seconds": "s",
    "max_staleness": "versions",
    "max_token_staleness": "versions",
    "max_waiting": "groups",
    "micro_batch_size": "samples",
    "micro_batch_tokens": "tokens",
    "min_replicas": "replicas",
    "prompts_per_step": "prompts",
    "publish_every": "steps",
    "rollout_timeout": "s",
    "step_limit": "s",
    "steps": "steps",
    "stop_timeout": "s",
    "threads": "threads",
    "top_k": "tokens",
    "weights_timeout": "s",
}
"""Unit of each setting that is a number; "": it has none. Each number needs a line."""


def _recipe_settings() -> dict[str, Any]:
    return settings_of(PPORecipe) | settings_of(GRPORecipe)


SETTINGS_PAGE = """# Settings

{made}
A job has the settings of its recipe. A task has settings that Redis keeps. A stage and an open
stream have some of their own.

## Recipes

A value comes from the class of the recipe, then from a TOML file, then from the variable
`REDRB_NAME`, then from the flag `--name`. The last one holds. The file is the one beside the recipe
with the same name, or that of `--settings`. `redrb settings my_recipe.py` prints each value and its
origin.

{recipes}
## Tasks

Give them to `ExperienceStream(client, task, limit=4096)`, or change them with
[`redrb set`](commands/set.md). Redis keeps them: a process that gives no value uses the task's.

{tasks}
## Streams

Arguments of `ExperienceStream` that belong to one process. Redis does not keep them.

{streams}
## Stages

Flags of [`redrb-stage`](commands/redrb-stage.md), or variables such as `REDRB_BATCH`.

{stages}
## Environment variables

Each setting of a recipe or stage can be given as a variable: `learning_rate` is
`REDRB_LEARNING_RATE`. These stand for themselves:

| variable | meaning |
|---|---|
{variables}"""

VARIABLES = {
    "REDRB_URL": "where Redis is, with user and password; used wherever no URL is given",
    "REDRB_RECIPE": "the recipe of a worker that names none",
    "REDRB_SETTINGS": "the TOML file of a worker that names none",
    "REDRB_NAMESPACE": "namespace of the plug-ins for verl, NeMo RL, slime and miles",
    "REDRB_SECRET": "key with which NeMo RL's and verl's plug-ins sign pickled values",
    "REDRB_TRANSFER_QUEUE": "1: verl uses redrb in place of TransferQueue",
    "REDRB_TRANSFER_QUEUE_LATER": "drop: a restart of verl drops the rows that were put after its "
    "checkpoint; default: keep",
    "REDRB_USER_PASSWORD": "password of the user that `redrb acl --apply` makes",
    "REDRB_DASHBOARD_TOKEN": "token of the page of `redrb dashboard`; default: a random one",
    "REDRB_GATEWAY_TOKEN": "token that opens sessions of `redrb gateway`; default: none is needed",
}


def _settings() -> str:
    return SETTINGS_PAGE.format(
        made=MADE,
        recipes="".join(_of_recipes()),
        tasks=_of_tasks(),
        streams=_of_streams(),
        stages=_rows(fields(stage.StageSettings), get_type_hints(stage.StageSettings)),
        variables="".join(f"| `{name}` | {text} |\n" for name, text in VARIABLES.items()),
    )


OWNERS: dict[type, str] = {
    JobSettings: "All workers",
    MakerSettings: "Makers",
    TrainerSettings: "The trainer",
    Recipe: "Groups that are not trained",
    StepSettings: "The training step",
    LanguageRecipe: "Sampling from a causal model",
    EngineSettings: "The inference server of makers",
    PPORecipe: "PPO",
    GRPORecipe: "GRPO",
}
"""The classes that declare settings of recipes, and the heading of each."""

HEAD = "| setting | default | unit | meaning |\n|---|---|---|---|\n"


def _of_recipes() -> Iterator[str]:
    by_owner: dict[type, list[Any]] = {}
    for recipe in (PPORecipe, GRPORecipe):
        known = {item.name for items in by_owner.values() for item in items}
        for owner in reversed(recipe.__mro__):
            for name, item in settings_of(recipe).items():
                if name not in known and name in vars(owner):
                    known.add(name)
                    by_owner.setdefault(owner, []).append(item)
    for owner, title in OWNERS.items():
        items = by_owner.pop(owner)
        yield f"### {title}\n\n{_rows(items, {item.name: item.type for item in items})}\n"
    assert not by_owner


def _rows(items: Sequence[Any], kinds: dict[str, Any]) -> str:
    rows = []
    for item in items:
        kind = kinds[item.name]
        default = "none" if item.default in ("", None, MISSING) else f"`{shown(item.default)}`"
        ranges = [
            f"{words} {', '.join(bound) if words == 'one of' else bound:}"
            for words, bound in item.metadata["ranges"].items()
            if bound is not None and not (words == "at least" and bound == 0)
        ]
        allowed = f" ({'; '.join(ranges)})" if ranges else ""
        name = item.name.rstrip("_")
        text = _cell(f"{item.metadata['help']}{allowed}")
        rows.append(f"| `{name}` | {default} | {_unit(item.name, kind)} | {text} |\n")
    return HEAD + "".join(rows)


def _unit(name: str, kind: Any) -> str:
    if kind in (int, float):
        return UNITS[name]
    return {"bool": "yes or no", "str": "text"}[kind.__name__]


def described(owner: Any, section: str) -> dict[str, str]:
    """Return the texts of a Google-style section of a docstring, by name."""
    text = inspect.getdoc(owner) or ""
    body = re.search(rf"^{section}:\n((?: +.*\n?|\n)*)", text, re.MULTILINE)
    assert body, (owner, section)
    found = re.findall(r"^    (\w+): (.*(?:\n      +.*)*)", body[1], re.MULTILINE)
    return {name: re.sub(r"\s+", " ", words) for name, words in found}


def _of_tasks() -> str:
    texts = described(TaskSettings, "Attributes")
    rows = []
    for name, setting in SETTINGS.items():
        number = setting.value in (int, float)
        unit = UNITS[name] if number or name == "keep" else ""
        change = "no" if setting.fixed else "yes"
        cells = (f"`{name}`", _default_of(texts[name]), unit, change, _cell(texts[name]))
        rows.append(f"| {' | '.join(cells)} |\n")
    return (
        "| setting | default | unit | changes while the task exists | meaning |\n"
        f"|---|---|---|---|---|\n{''.join(rows)}\n"
    )


def _default_of(text: str) -> str:
    """Return the default that the description of a task's setting names."""
    word = re.search(r"\"?([\w-]+)\"? \((?:by \w+, )?default\)|\(by \w+, default\)", text)
    named = re.search(r"[Dd]efault:? ([\w ]+)", text)
    if word and word[1]:
        return f"`{word[1]}`"
    if named:
        found = named[1].strip()
        return "none" if found.startswith(("no ", "none", "any")) else f"`{found}`"
    quoted = re.search(r"\"(\w+)\" \([^)]*default\)", text)
    assert quoted, text
    return f"`{quoted[1]}`"


def _of_streams() -> str:
    texts = described(ExperienceStream.__init__, "Args")
    units = {"lease_ms": "ms", "min_replicas": "replicas"}
    rows = []
    for name, parameter in inspect.signature(ExperienceStream.__init__).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            value = parameter.default
            default = "none" if value in (None, ()) else f"`{_plain(value)}`"
            unit = units.get(name, "")
            rows.append(f"| `{name}` | {default} | {unit} | {_cell(texts[name])} |\n")
    return f"{HEAD}{''.join(rows)}\n"


def _plain(value: Any) -> str:
    if isinstance(value, frozenset | set | tuple):
        return ", ".join(sorted(map(str, value)))
    return shown(value)


assert set(MODULES) >= {f"redrb.{page}" for page in API if page not in ("connect", "errors")}

if __name__ == "__main__":
    write()
