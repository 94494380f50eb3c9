"""Runs a worker of `redrb run`, and kills it when the run is gone, however that has ended.

`python -m redrb.cli.processes.supervised MODULE ARGUMENTS` does what `python -m MODULE ARGUMENTS`
does; behind `--` stands a program with its arguments instead.
Standard input is a pipe to which the run never writes, and which the kernel closes with the run.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading

from redrb.cli.processes.lifetime import WATCHER


def _end_with_run(pipe: int) -> None:
    """Wait until the run is gone; then kill this process and its children."""
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)  # the run has made it the leader of a group


def main() -> None:
    """Run the module, or the program."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_end_with_run, args=(pipe,), name=WATCHER, daemon=True).start()
    del sys.argv[0]
    if sys.argv[0] == "--":
        raise SystemExit(subprocess.call(sys.argv[1:]))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
