"""Programs that repeat the failure of a property test: its errors have one as a note."""

from __future__ import annotations

import functools
import inspect
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

_CLONE = Path(__file__).parents[1]

FIXTURES = ("client", "pages", "namespace", "real_url", "url")


class _NoLiteral(Exception):
    """A value cannot be written in a program."""


def note_programs(test: Any) -> None:
    """Let the errors of a property test name the program that repeats them."""
    handle = getattr(test, "hypothesis", None)
    if handle is None or hasattr(handle.inner_test, "is_noted"):
        return
    inner = handle.inner_test

    @functools.wraps(inner)
    def noted(*given: Any, **named: Any) -> None:
        try:
            inner(*given, **named)
        except Exception as error:
            error.add_note(program(test, named))
            raise

    noted.is_noted = True  # type: ignore[attr-defined]
    handle.inner_test = noted


def program(test: Callable[..., None], given: Mapping[str, Any]) -> str:
    """Return a program that runs a test once, with these arguments."""
    values = {name: value for name, value in given.items() if name not in FIXTURES}
    try:
        lines = [f"    {name}={_literal(value, '    ')}," for name, value in values.items()]
    except _NoLiteral as error:
        return f"Not all arguments can be written as a program: {error}."
    return "\n".join(
        (
            "A program that repeats it (REDRB_URL: on another server than fakeredis):",
            "from math import inf, nan",
            f"from {_module(test)} import *",
            "from tests.repeating import repeat",
            "repeat(",
            f"    {test.__name__},",
            *lines,
            ")",
        )
    )


def repeat(test: Any, **given: Any) -> None:
    """Run a property test once, with these arguments and the fixtures that it needs."""
    inner = test.hypothesis.inner_test
    names = inner.__code__.co_varnames[: inner.__code__.co_argcount]
    with _fixtures() as found:
        inner(**{name: found(name) for name in names if name not in given}, **given)


@contextmanager
def _fixtures() -> Iterator[Callable[[str], Any]]:
    import redrb
    from tests.conftest import small_pages

    url = os.environ.get("REDRB_URL", f"fake://{uuid.uuid4().hex}")
    with ExitStack() as scope, pytest.MonkeyPatch.context() as patch:

        def find(name: str) -> Any:
            if name == "client":
                return scope.enter_context(redrb.connect(url, retry_s=10))
            if name == "pages":
                return scope.enter_context(small_pages(patch))
            return url if name.endswith("url") else uuid.uuid4().hex

        yield find


def _module(test: Callable[..., None]) -> str:
    """Return the name under which a program in the clone imports the module of a test."""
    path = Path(inspect.getfile(inspect.unwrap(test))).relative_to(_CLONE)
    return ".".join(path.with_suffix("").parts)


def _literal(value: Any, indent: str = "") -> str:
    """Return an expression of the value; the parts of a list have a line each."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, list) and indent and value:
        inner = "".join(f"{indent}    {_literal(each)},\n" for each in value)
        return f"[\n{inner}{indent}]"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}([{', '.join(map(_literal, value))}])"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_literal(each)}, " for each in value) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if is_dataclass(value) and not isinstance(value, type):
        own = (f"{each.name}={_literal(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__name__}({', '.join(own)})"
    raise _NoLiteral(f"a {type(value).__name__}")
