"""Flags of commands: one frozen dataclass gives flags, REDRB_* variables and `--help`."""

from __future__ import annotations

import argparse
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, NoReturn, Protocol, TypeVar, get_type_hints

from redrb import environment
from redrb.checks import did_you_mean
from redrb.errors import ConfigError

T = TypeVar("T")

_PASSWORD_OPTION = re.compile(r"[?&]\w*password=.")


def option(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    agree: bool = True,
) -> Any:
    """Return a dataclass field that becomes an option.

    Args:
        choices: The allowed words; empty: any.
        agree: Of a setting of a recipe: whether makers with another value than the trainer's are
            refused. False where only one of the two uses it, such as a learning rate.
    """
    ranges = {"at least": least, "more than": above, "at most": most, "one of": choices or None}
    return field(default=default, metadata={"help": text, "ranges": ranges, "agree": agree})


def url_option(text: str) -> Any:
    """Return a dataclass field that becomes the option with the URL of Redis: a `UrlFlag`."""
    return field(
        default="", metadata={"help": text, "ranges": {}, "agree": False, "action": UrlFlag}
    )


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors name what is wrong and where help is, without the list of all flags."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments; the process ends with status 2 if some are unknown."""
        options, unknown = super().parse_known_args(args, namespace)
        unknown = self._rest_of_list(options, unknown)
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), "")
            name = flag.partition("=")[0]
            if flag:
                flags = [word for action in self._actions for word in action.option_strings]
                self.error(f"there is no flag {name}{did_you_mean(name, flags, least=0.7)}")
            self.error(f"there is no place for the argument {unknown[0]!r}.")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        if "required: TASK" in message:
            message += ". `redrb ls --namespace NAME` lists the tasks"
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} Help: {self.prog} --help\n")

    def _rest_of_list(self, options: argparse.Namespace, unknown: list[str]) -> list[str]:
        """Add words after a flag to the positionals; returns those that belong nowhere."""
        lists = [each for each in self._get_positional_actions() if each.nargs in ("*", "+", "?")]
        if not lists or any(word.startswith("-") for word in unknown):
            return unknown
        if lists[-1].nargs == "?":
            if len(unknown) > 1 or getattr(options, lists[-1].dest) is not None:
                return unknown
            for word in unknown:
                setattr(options, lists[-1].dest, self._get_values(lists[-1], [word]))
            return []
        try:
            more = self._get_values(lists[-1], unknown) if unknown else []
        except argparse.ArgumentError as error:
            self.error(str(error))
        known = getattr(options, lists[-1].dest) or []
        setattr(options, lists[-1].dest, [*known, *more])
        return []


class UrlFlag(argparse.Action):
    """The flag `--url`: it refuses a password, which every user of the machine could read."""

    def __call__(self, _: Any, namespace: Any, values: Any, _option: str | None = None) -> None:
        """Store the URL; the process ends with status 2 if it has a password."""
        if has_password(values):
            variable = variable_of(self.dest)
            raise argparse.ArgumentError(
                self,
                "the URL has a password, which the list of processes shows to every user of this "
                f"machine. Set {variable} instead, for example from a file that only you can read: "
                f'{variable}="$(cat redis-url)".',
            )
        setattr(namespace, self.dest, values)


def has_password(url: str) -> bool:
    """Return whether a URL has a password, also one that is not percent-encoded."""
    rest = url.partition("://")[2]
    login, at, _ = rest.rpartition("@")
    return bool(_PASSWORD_OPTION.search(rest)) or bool(at and login.partition(":")[2])


class RangeChecks:
    """Base of dataclasses of options: making one with a value out of range raises ConfigError."""

    def __post_init__(self) -> None:
        options: Any = self
        for item in fields(options):
            flag = f"{flag_of(item.name)} (or {variable_of(item.name)})"
            check_range(flag, item, getattr(self, item.name))


@dataclass(frozen=True, kw_only=True)
class Settings(RangeChecks):
    """Base of a command's settings."""


def check_range(name: str, item: Field[Any], value: Any) -> None:
    """Raise ConfigError if a value is out of the range of its option."""
    for words, bound in item.metadata["ranges"].items():
        if bound is not None and not _IS[words](value, bound):
            allowed = ", ".join(bound) if words == "one of" else bound
            raise ConfigError(f"{name} is {value}: it must be {words} {allowed}.")


_IS: dict[str, Callable[[Any, Any], bool]] = {
    "at least": operator.ge,
    "more than": operator.gt,
    "at most": operator.le,
    "one of": lambda value, allowed: value in allowed,
}


def add_options(parser: Flags, *settings: type) -> None:
    """Add a flag for each field of these dataclasses.

    Field `group_size` becomes `--group-size`; the variable `REDRB_GROUP_SIZE` replaces its default.
    """
    for each in settings:
        hints = get_type_hints(each)
        for item in fields(each):
            _add(parser, item, hints[item.name])


def settings_from(options: argparse.Namespace, settings: type[T]) -> T:
    """Return the dataclass `settings` with the parsed options; raises ConfigError."""
    return settings(**{item.name: getattr(options, item.name) for item in fields(settings)})  # type: ignore[arg-type]


def flag_of(name: str) -> str:
    """Return the flag of field `name`; the flag `--from` is that of `from_`."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def variable_of(name: str) -> str:
    """Return the variable that replaces the default of field `name`."""
    return environment.PREFIX + name.rstrip("_").upper()


def _add(parser: Flags, item: Field[Any], kind: Any) -> None:
    if item.default is MISSING:
        raise TypeError(f"{item.name} needs a default to become an option")
    # argparse converts a default that is a string, and rejects it like a flag's value
    default = environment.variable(variable_of(item.name), shown(item.default))
    add_flag(parser, item, kind, default=default)


def add_flag(parser: Flags, item: Field[Any], kind: type, *, default: Any) -> None:
    """Add the flag of one field.

    `default` is the parsed value where the flag is not given; a text is parsed like a flag's value.
    """
    # a flag alone means yes
    forms: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool else {}
    if "action" in item.metadata:
        forms["action"] = item.metadata["action"]
    known = "" if item.default in ("", None) else f"default: {shown(item.default)}; "
    parser.add_argument(
        flag_of(item.name),
        dest=item.name,
        default=default,
        type=yes_or_no if kind is bool else kind,
        metavar="YES|NO" if kind is bool else kind.__name__.upper(),
        help=f"{item.metadata['help']} ({known}{variable_of(item.name)})".replace("%", "%%"),
        **forms,
    )


def shown(value: Any) -> str:
    """Return a value as a flag or variable takes it."""
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def yes_or_no(text: str) -> bool:
    """Return the value of a flag that is on or off; raises argparse's error for other texts."""
    known = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return known[text.lower()]


class Flags(Protocol):
    """A parser of arguments, or a group of its arguments."""

    def add_argument(self, *names: str, **forms: Any) -> argparse.Action:
        """Add an argument."""
