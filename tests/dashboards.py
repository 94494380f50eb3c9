"""A process of `redrb dashboard` for tests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from redrb.environment import PREFIX, child_environment

TOKEN = "a-token-of-tests"


class Dashboard:
    """A process of `redrb dashboard` on a free port of loopback.

    Attributes:
        url: URL of its page.
        process: The process.
    """

    def __init__(self, redis_url: str, namespace: str) -> None:
        command = [sys.executable, "-m", "redrb.cli", "dashboard", "--port", "0", "--json"]
        self.process = subprocess.Popen(
            [*command, "--namespace", namespace],
            env=child_environment(without=PREFIX, REDRB_URL=redis_url, REDRB_DASHBOARD_TOKEN=TOKEN),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate(timeout=10)[1])
        printed = json.loads(line)
        self.url: str = printed["url"]
        assert printed["token"] == TOKEN

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; returns the exit status and what the process wrote to stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def close(self) -> None:
        """End the process if it runs."""
        self.process.kill()
        self.process.communicate(timeout=10)
