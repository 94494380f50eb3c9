"""A real vLLM, in a virtual environment of its own, with a small model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

VLLM = os.environ.get("VLLM", "")

START_S = 300.0

PROMPT = [40, 41, 42]
"""Prompts of all tests are as long."""


class RealVLLM:
    """A server that can be killed and started again at the same address."""

    def __init__(self, folder: Path, log: Path, *arguments: str, **environment: str) -> None:
        self.model = folder / "model"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(str(folder / "bin" / "vllm"), "serve", str(self.model), "--port", str(self.port)),
            *("--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager"),
            *arguments,
        ]
        self._environment = {**os.environ, **environment}
        self._log = log.open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        self._process = subprocess.Popen(
            self._command,
            env={**self._environment, **settings},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        ends = time.monotonic() + START_S
        while time.monotonic() < ends and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                threading.Event().wait(0.5)
        raise AssertionError(f"vLLM did not start: {self._log.name}")

    def kill(self) -> None:
        """Kill the server and all of its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End it."""
        self.kill()
        self._log.close()

    def policy(self, seed: int) -> PreTrainedModel:
        """Return the server's model with other weights: those of a seed."""
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.bfloat16)
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
        return model.eval()


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVLLM]:
    server = RealVLLM(Path(VLLM), tmp_path_factory.mktemp("vllm") / "log")
    server.start()
    yield server
    server.close()


@torch.no_grad()
def log_probs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return the log-probability of each token after the prompt."""
    table = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    places = range(len(PROMPT), len(tokens))
    return torch.stack([table[at - 1, tokens[at]] for at in places])
