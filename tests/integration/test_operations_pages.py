"""The commands of the pages about operating redrb, run as they are printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from redis.backoff import NoBackoff
from redis.retry import Retry

import redrb
from tests.samples import numbered
from tests.servers import await_server, free_port, programs, with_tls
from tests.tools import need

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
COMMANDS = re.compile(r"<!-- a test runs these commands -->\n```sh\n(.*?)```", re.DOTALL)
SERVER = re.compile(r"<!-- a test runs this server -->\n```sh\n(.*?)```", re.DOTALL)
WITH_COMMANDS = [
    page.stem for page in sorted(PAGES.glob("*.md")) if COMMANDS.search(page.read_text())
]
USUAL = """
port 6379
dir .
appendonly yes
save ""
"""


def script(folder: Path, name: str, words: str) -> None:
    """Write a program."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{words}\n")
    path.chmod(0o755)


def variables(folder: Path, **more: str) -> dict[str, str]:
    """Return an environment in which programs of the folder `bin` come first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REDRB_")}
    return {
        **kept,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(PAGES.parents[1]),
        **more,
    }


@contextmanager
def started(
    command: list[str], folder: Path, env: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and end it with all that it has started at the end of the block."""
    with (folder / "output").open("a") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """End a program and what it has started, if any of it runs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def fill(url: str) -> None:
    """Make the task and the weights that pages speak of."""
    with redrb.connect(url) as client:
        stream = redrb.ExperienceStream(client, "math", limit=4096)
        for number in range(20):
            stream.put([numbered(number), numbered(number)], policy_version=number)
        with stream.take(3, timeout=10) as lease:
            lease.reject("reward is nan")
        redrb.WeightPublisher(client, "policy").publish({"w": torch.zeros(3)})


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_the_commands_of_a_page_run(name: str, tmp_path: Path) -> None:
    page = (PAGES / f"{name}.md").read_text()
    port, own = str(free_port()), SERVER.search(page)
    tls = own is not None and "tls-port" in own[1]
    program = list(programs().values())[-1]
    if tls:
        need("openssl")
        program = programs().get(with_tls()[0]) or need("redis-server")
    password = "change-me" if own is not None and "requirepass" in own[1] else ""
    script(tmp_path, "bin/redis-server", f'exec {program} "$@"')
    script(
        tmp_path,
        "bin/redis-cli",
        f'exec {need("redis-cli")} -p {port} {"--tls --cacert ca.pem" if tls else ""} "$@"',
    )
    # in the background; tests/faults/test_upgrade.py changes the version, too
    script(
        tmp_path,
        "NEW/redis-server",
        f'{program} "$@" >new.log 2>&1 &\n'
        "for _ in {1..200}; do redis-cli ping 2>&1 | grep -q PONG && exit 0; sleep 0.1; done",
    )
    # doctor has found something: that is no failure of the page
    script(
        tmp_path,
        "bin/redrb",
        f'{sys.executable} -m redrb.cli "$@"; status=$?\n'
        '[ "$1 $status" = "doctor 1" ] || exit $status',
    )
    (tmp_path / "redis.conf").write_text(USUAL.replace("6379", port))
    start = own[1].replace("6379", port) if own else "redis-server redis.conf"
    known = variables(
        tmp_path, REDRB_URL=f"redis://{password and f':{password}@'}localhost:{port}/0"
    )
    if password:
        known["REDISCLI_AUTH"] = password
    with started(["bash", "-ec", start], tmp_path, known):
        certificate = {"ssl": True, "ssl_ca_certs": str(tmp_path / "ca.pem")} if tls else {}
        await_server(
            redis.Redis(port=int(port), retry=Retry(NoBackoff(), 0), **certificate)  # type: ignore[arg-type]
        )
        if tls:
            known["REDRB_URL"] = f"rediss://localhost:{port}/0?ssl_ca_certs={tmp_path / 'ca.pem'}"
        fill(known["REDRB_URL"])
        words = "\n".join(COMMANDS.findall(page)).replace("6379", port)
        with started(["bash", "-exc", words], tmp_path, known) as run:
            assert run.wait(100) == 0, (tmp_path / "output").read_text()[-4000:]
    assert not re.search(
        r"^(ERR|NOAUTH|NOPERM|WRONGPASS)|Could not connect",
        (tmp_path / "output").read_text(),
        re.MULTILINE,
    )
