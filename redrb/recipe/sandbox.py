"""Unit tests of code that a model wrote, in a process with limits: Linux on x86-64 or aarch64."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

from redrb.checks import checked_int, checked_number
from redrb.errors import ConfigError

_PROGRAM = Path(__file__).with_name("sandboxed.py")

_START_S = 10.0
"""Seconds that Python may take to start on a busy machine, beside the seconds of the tests."""

_REFUSED = 77
"""Exit status of a process that could not be limited."""


async def passes_tests(
    code: str, tests: str | Sequence[str], *, seconds: float = 5.0, memory_mb: int = 512
) -> bool:
    """Return whether tests, such as lines of `assert`, run to their end after some code.

    Code and tests run in a Python process of their own, as many at a time as there are processors.
    The kernel allows this process, once it has started, only the system calls that a computation
    needs: it can compute, read files, and write to no file. It has no network, starts no process or
    thread, sends no signal, and gets no variables of the environment. Its output is dropped.

    This does not keep out: reading of all files that this user may read, which code can react to
    but not send anywhere; code that finds its tests in memory, or makes `assert` mean something
    else, to pass without being right; faults of the kernel. For code of people who may be hostile,
    run makers in a virtual machine.

    Args:
        code: Python source; see `redrb.recipe.code_in`.
        tests: Python source that raises if the code is wrong, or several pieces of it.
        seconds: Most seconds of computation.
        memory_mb: Most MiB of memory.

    Raises:
        ConfigError: An argument is not usable, or this machine cannot limit a process so.
    """
    seconds = checked_number("seconds", seconds)
    memory_mb = checked_int("memory_mb", memory_mb, 64)
    joined = tests if isinstance(tests, str) else "\n".join(tests)
    run = partial(_run, code, joined, seconds, memory_mb)
    return await asyncio.get_running_loop().run_in_executor(_threads(), run)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "redrb-tests")


def _run(code: str, tests: str, seconds: float, memory_mb: int) -> bool:
    word = secrets.token_hex(16)
    job = {"word": word, "code": code, "tests": tests, "seconds": seconds, "memory_mb": memory_mb}
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(_PROGRAM)],
            input=json.dumps(job).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            timeout=seconds + _START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode == _REFUSED:
        raise ConfigError(
            f"this machine ({platform.system()} on {platform.machine()}) cannot limit the process "
            "of unit tests: that needs Linux on x86-64 or aarch64, with seccomp filters."
        )
    return done.returncode == 0 and done.stdout == word.encode()
