"""The process of `redrb.recipe.sandbox`: limits itself, then runs code and its tests.

It imports nothing of redrb. What it may do is a list of system calls that are allowed, which a
filter of the kernel (seccomp) enforces; each other one fails with EPERM.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Name of the architecture in filters, and column of `_ALLOWED`."""

_ALLOWED = """
    read 0 63, write 1 64, close 3 57, stat 4 -1, fstat 5 80, lstat 6 -1, lseek 8 62, mmap 9 222,
    mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135,
    rt_sigreturn 15 139, pread64 17 67, access 21 -1, sched_yield 24 124, mremap 25 216,
    madvise 28 233, nanosleep 35 101, getpid 39 172, exit 60 93, uname 63 160, getcwd 79 17,
    readlink 89 -1, gettimeofday 96 169, sysinfo 99 179, getuid 102 174, getgid 104 176,
    geteuid 107 175, getegid 108 177, sigaltstack 131 132, gettid 186 178, time 201 -1,
    futex 202 98, sched_getaffinity 204 123, getdents64 217 61, restart_syscall 219 128,
    clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94,
    newfstatat 262 79, readlinkat 267 78, faccessat 269 48, getrandom 318 278, statx 332 291,
    rseq 334 293, faccessat2 439 439
"""
"""Name and numbers of each call, in asm/unistd_64.h and asm-generic/unistd.h; -1: there is none."""

_OPEN = ((2, 1), (257, 2)), ((56, 2),)
"""Numbers of `open` and `openat` with the place of their flags, by column."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_LOAD, _IF_EQUAL, _IF_ANY, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of the kernel's BPF
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # errno 1 is EPERM
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # of struct seccomp_data
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # of prctl


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_of(machine: str) -> bytes:
    """Return the filter of an architecture, as the kernel reads it."""
    code, column = _MACHINES[machine]
    steps = [(_LOAD, 0, 0, _MACHINE), (_IF_EQUAL, 1, 0, code), (_RETURN, 0, 0, _KILL)]
    steps.append((_LOAD, 0, 0, _NUMBER))
    for call in _ALLOWED.split(","):
        number = int(call.split()[1 + column])
        if number >= 0:
            steps += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, place in _OPEN[column]:
        steps += [
            (_IF_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * place),
            (_IF_ANY, 1, 0, _WRITING),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _REFUSE),
        ]
    steps.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def limit(seconds: float, memory_mb: int) -> None:
    """Limit this process for good; ends it with status 77 if that cannot be done."""
    most = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    cpu = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    steps = filter_of(platform.machine())
    program = _Program(len(steps) // 8, steps)
    call = ctypes.CDLL(None, use_errno=True).prctl
    if call(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or call(_SECCOMP, _FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    """Run the job of the standard input; print its word after the last test."""
    job = json.load(sys.stdin)
    word, write, leave = job.pop("word").encode(), os.write, os._exit
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    try:
        limit(job["seconds"], job["memory_mb"])
    except (OSError, KeyError, ValueError):
        leave(77)
    names: dict[str, Any] = {"__name__": "__main__"}
    for part in ("code", "tests"):
        exec(compile(job[part], part, "exec"), names)  # noqa: S102 (that is its purpose)
    write(out, word)
    leave(0)


if __name__ == "__main__":
    main()
