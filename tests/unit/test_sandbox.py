"""Unit tests of generated code run in a process that can compute, and nothing else."""

import asyncio
import os
import platform
import struct
import sys
import threading

import pytest

from redrb import ConfigError
from redrb.recipe import passes_tests, sandbox
from redrb.recipe.sandboxed import filter_of

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="needs seccomp filters",
)


def passes(code, tests="", **limits):
    return asyncio.run(passes_tests(code, tests, **limits))


def test_right_code_passes_and_wrong_code_does_not():
    assert passes("def add(a, b): return a + b", ["assert add(1, 2) == 3", "assert add(0, 0) == 0"])
    assert not passes("def add(a, b): return a - b", "assert add(1, 2) == 3")
    assert not passes("def add(a, b): return", "assert add(1, 2) == 3")
    assert not passes("def add(a, b) return", "")
    assert not passes("nothing", "")


def test_modules_of_python_can_be_used():
    modules = (
        "collections, dataclasses, datetime, decimal, heapq, itertools, json, math, random, re"
    )
    assert passes(f"import {modules}", "assert math.gcd(4, 6) == 2 and random.random() < 1")


@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)", "raise SystemExit"])
def test_code_that_ends_before_its_tests_does_not_pass(leave):
    assert not passes(f"import os, sys\n{leave}", "assert False")


def test_what_code_prints_is_no_verdict():
    assert not passes("print('x' * 100_000)", "assert False")
    assert passes("print('x' * 100_000)", "assert True")


@pytest.mark.parametrize(
    "action",
    [
        "socket.socket()",
        "socket.socketpair()",
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['true'])",
        "threading.Thread(target=print).start()",
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 0)",
        "open(PATH, 'w')",
        "os.open(PATH, os.O_RDWR)",
        "os.open(PATH, os.O_CREAT)",
        "os.truncate(PATH, 0)",
        "os.unlink(PATH)",
        "os.rename(PATH, PATH + '2')",
        "os.mkdir(PATH + '2')",
        "os.chmod(PATH, 0)",
        "os.utime(PATH)",
        "os.memfd_create('x')",
        "os.setpriority(0, 0, 5)",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    ],
)
def test_what_is_no_computation_is_refused(action, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    begin = f"import os, resource, socket, subprocess, threading\nPATH = {str(kept)!r}\n"
    refused = (
        f"{begin}try:\n    {action}\nexcept (OSError, RuntimeError, ValueError): pass\nelse: 1 / 0"
    )
    assert not passes(begin + action)
    assert passes(refused)
    assert kept.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [kept]


def test_variables_of_the_environment_do_not_reach_it(monkeypatch):
    monkeypatch.setenv("REDRB_URL", "redis://:secret@host")
    assert passes("import os", "assert 'REDRB_URL' not in os.environ")


def test_memory_and_time_are_limited(monkeypatch):
    monkeypatch.setattr(sandbox, "_START_S", 1.0)
    assert passes("x = bytearray(50 * 2**20)")
    assert not passes("x = bytearray(2**30)")
    assert not passes("while True: pass", seconds=1.0)
    assert not passes("import time\ntime.sleep(600)", seconds=1.0)


def test_tests_of_many_completions_run_at_the_same_time_and_leave_nothing():
    async def many():
        return await asyncio.gather(*(passes_tests(f"x = {n}", "assert x % 2") for n in range(12)))

    assert asyncio.run(many()) == [bool(n % 2) for n in range(12)]
    names = [each.name for each in threading.enumerate() if each.name.startswith("redrb-tests")]
    assert len(names) <= (os.cpu_count() or 1)


def test_filters_refuse_what_they_do_not_name():
    for machine in ("x86_64", "aarch64"):
        steps = list(struct.iter_unpack("=HBBI", filter_of(machine)))
        assert len(steps) < 4096  # the kernel's limit
        assert steps[-1] == (0x06, 0, 0, 0x00050001)
        for place, (code, yes, no, _) in enumerate(steps):
            if code in (0x15, 0x45):  # jumps stay within the filter
                assert place + 1 + max(yes, no) < len(steps)


def test_a_machine_that_cannot_limit_a_process_is_named(monkeypatch, tmp_path):
    program = tmp_path / "sandboxed.py"
    program.write_text("import os\nos._exit(77)")
    monkeypatch.setattr(sandbox, "_PROGRAM", program)
    with pytest.raises(ConfigError, match="needs Linux on x86-64 or aarch64"):
        passes("x = 1")
    with pytest.raises(ConfigError, match="memory_mb=1: it must be an int, at least 64"):
        passes("x = 1", memory_mb=1)
