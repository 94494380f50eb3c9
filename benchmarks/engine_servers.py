"""vLLM servers for the benchmark of engines, and the memory of the process that has the model."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

START_S = 300.0
SAMPLE_S = 0.002
"""Pause between two looks at a process."""

BACKEND = """--weight-transfer-config={"backend": "redrb"}"""

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    # tensors that were freed go back to the system: a peak is not hidden by the one before it
    "MALLOC_MMAP_THRESHOLD_": "131072",
}


def make_model(environment: Path, folder: Path, *, width: int, layers: int) -> nn.Module:
    """Write a random model in bfloat16 with the tokenizer of `environment`/model; returns it."""
    config = AutoConfig.from_pretrained(environment / "model")
    config.update(
        {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
            "num_attention_heads": width // 64,
            "num_key_value_heads": width // 64,
        }
    )
    torch.manual_seed(0)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in (environment / "model").glob("tokenizer*"):
        shutil.copy2(file, folder / file.name)
    return cast(nn.Module, model)


class VLLM:
    """A server that runs.

    Attributes:
        url: Its address.
        model: The folder of its model.
    """

    def __init__(self, environment: Path, model: Path, redis_url: str, log: Path) -> None:
        self.model = model
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [
                *(str(environment / "bin" / "vllm"), "serve", str(model), "--port", str(port)),
                *("--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager"),
                *("--enable-scale-out", BACKEND),
            ],
            env={**os.environ, **SETTINGS, "REDRB_URL": redis_url},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait until it answers."""
        ends = time.monotonic() + START_S
        while time.monotonic() < ends and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise SystemExit(f"vLLM did not start: {Path(self._log.name).read_text()[-2000:]}")

    def worker(self) -> int:
        """Return the process that has the model: the largest one of the server."""
        own = [
            int(path.name)
            for path in Path("/proc").iterdir()
            if path.name.isdigit() and _session(int(path.name)) == self._process.pid
        ]
        return max(own, key=own_memory)

    def close(self) -> None:
        """End it, and all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


@contextmanager
def vllm_servers(
    count: int, environment: Path, model: Path, redis_url: str, logs: Path
) -> Iterator[list[VLLM]]:
    """Start servers with redrb's backend, wait until all answer, and end them."""
    with ExitStack() as scope:
        servers = []
        for number in range(count):
            server = VLLM(environment, model, redis_url, logs / f"vllm-{number}.log")
            scope.callback(server.close)
            servers.append(server)
            server.wait()
        yield servers


def own_memory(pid: int) -> int:
    """Return the bytes of a process that it shares with no other one; 0 if it has ended."""
    return _field(Path(f"/proc/{pid}/status"), "RssAnon")


def shared_memory(pids: Iterable[int]) -> int:
    """Return the bytes in /dev/shm that processes have mapped; those of several count once."""
    return sum(_field(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Shmem") for pid in pids)


def _field(path: Path, field: str) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
    return 0


def _session(pid: int) -> int:
    with suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid)
    return 0


class Peak:
    """The most memory of its own that a process has in a block, above that at the beginning.

    Attributes:
        above: The bytes.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._before, self.above = pid, own_memory(pid), 0
        self._ended = threading.Event()
        self._watching = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watching.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.above = max(self.above, own_memory(self._pid) - self._before)
