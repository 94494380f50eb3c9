"""A maker with an inference server beside it, which it starts, and which ends with it.

`python -m redrb.cli.processes.engine_maker SERVER RECIPE FLAGS` does what
`redrb-maker RECIPE FLAGS` does; SERVER is the command of the server, without its port.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from redrb.cli.processes import maker
from redrb.cli.processes.lifetime import end
from redrb.environment import child_environment


def main(arguments: Sequence[str]) -> int:
    """Run both until the maker ends; returns its exit status.

    The process ends with status 1 if the server ends before.
    """
    server, *words = arguments
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "redrb.cli.processes.supervised", "--"),
            *(*shlex.split(server), "--port", str(port)),
        ],
        stdin=subprocess.PIPE,  # it closes with this process, which kills the server
        stdout=sys.stderr,
        env=child_environment(VLLM_SERVER_DEV_MODE="1"),
        start_new_session=True,
    )
    ending = threading.Event()

    def watch() -> None:
        status = process.wait()
        if not ending.is_set():
            print(f"the inference server ended with status {status}", file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        return maker.main([*words, f"--engine-url=http://127.0.0.1:{port}"])
    finally:
        ending.set()
        if process.stdin is not None:
            process.stdin.close()
        process.wait()


if __name__ == "__main__":
    end(main(sys.argv[1:]))
