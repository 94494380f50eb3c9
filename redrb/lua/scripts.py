"""Loads and runs the Lua scripts.

A script begins with a header: purpose, KEYS, ARGV, returns. A line `--@include name ...` names the
files of `redrb/lua/include` whose functions this file calls; the includes of these files are found
by themselves. A reply that has cases begins with a word. Repeated with the same arguments a script
changes nothing more, so the client repeats it when a connection breaks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from redis.exceptions import NoScriptError, ResponseError

from redrb.connection import Client, failures
from redrb.connection.transport import Argument, Pipeline, Reply

_INCLUDE = "--@include "


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script as the server runs it.

    Attributes:
        text: The script behind its includes, without comments and indentation.
        sha: SHA-1 of `text`, the name under which a server caches it.
        sources: File and line of each line of `text`, such as "redrb/lua/take/take.lua:37".
    """

    text: str
    sha: str
    sources: tuple[str, ...]


@cache
def load(name: str) -> Script:
    """Return the script in `redrb/lua/<name>.lua`, such as "take/finish"."""
    script = assemble(name, _read(name))
    failures.note_script(script.sha, script.sources)
    return script


def assemble(name: str, source: str) -> Script:
    """Return the script with this source: its includes first, without comments."""
    lines = [line for each in _includes(source) for line in _code_lines(each, _read(each))]
    lines += _code_lines(name, source)
    text = "\n".join(line for _, line in lines)
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(text, sha, tuple(source for source, _ in lines))


def run(
    client: Client,
    script: Script,
    keys: Sequence[Argument],
    arguments: Sequence[Argument],
    *,
    retry_s: float | None = None,
) -> Reply:
    """Run a script, and repeat it while Redis is unreachable; send its text if Redis lacks it.

    Raises:
        StoreUnavailable: Redis stayed unreachable.
        StoreError: The server or the script answered with an error.
    """
    return client.retrying(lambda: run_once(client, script, keys, arguments), retry_s=retry_s)


def run_once(
    client: Client, script: Script, keys: Sequence[Argument], arguments: Sequence[Argument]
) -> Reply:
    """Run a script without retries; raises redis-py's exceptions."""
    try:
        with suppress(NoScriptError):
            return client.once("EVALSHA", script.sha, len(keys), *keys, *arguments)
        return client.once("EVAL", script.text, len(keys), *keys, *arguments)
    except ResponseError as error:
        failures.name_scripts(error, [script.sha])
        raise


def add_to(
    pipeline: Pipeline,
    script: Script,
    keys: Sequence[Argument],
    arguments: Sequence[Argument],
    *,
    whole: bool,
) -> None:
    """Append a script to a pipeline.

    Args:
        pipeline: The pipeline.
        script: The script.
        keys: KEYS of the script.
        arguments: ARGV of the script.
        whole: Send the script's text instead of its SHA-1. In a transaction, a script that Redis
            lacks would fail after the other commands were done.
    """
    called = ("EVAL", script.text) if whole else ("EVALSHA", script.sha)
    pipeline.add(*called, len(keys), *keys, *arguments)
    pipeline.scripts.append(script.sha)


def _includes(source: str, found: dict[str, None] | None = None) -> list[str]:
    """Return the names of all includes of a source, each once, behind those that it needs."""
    found = {} if found is None else found
    for line in source.splitlines():
        if line.startswith(_INCLUDE):
            for each in line.removeprefix(_INCLUDE).split():
                name = f"include/{each}"
                if name not in found:
                    _includes(_read(name), found)
                    found[name] = None
    return list(found)


def _read(name: str) -> str:
    return files("redrb.lua").joinpath(f"{name}.lua").read_text("utf-8")


def _code_lines(name: str, source: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(source.splitlines(), start=1):
        if (code := line.strip()) and not code.startswith("--"):
            yield f"redrb/lua/{name}.lua:{number}", code
