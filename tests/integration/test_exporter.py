"""`redrb exporter` serves what Redis holds, and hangs on nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server

import redrb
from redrb import ExperienceStream
from redrb.cli import __main__ as cli
from redrb.environment import PREFIX, child_environment
from redrb.watch.metrics.metric import StateCollector
from redrb.watch.state.observer import LOOK_S, Observer
from tests.samples import numbered
from tests.servers import programs

pytestmark = pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return str(response.read().decode())


def test_the_command_serves_until_it_is_ended(real_url, namespace):
    with redrb.connect(real_url) as client:
        ExperienceStream(client, "math", namespace=namespace).put(numbered(2))
    command = ["exporter", "--port", "0", "--namespace", namespace, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "redrb.cli", *command],
        env=child_environment(
            without=PREFIX, REDRB_URL=real_url, PYTHONPATH=str(Path(cli.__file__).parents[2])
        ),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = json.loads(process.stdout.readline())["url"]
        text = fetched(url)
        group = f'group="default",namespace="{namespace}",task="math"'
        assert f"redrb_groups_put_total{{{group}}} 1.0" in text
        assert f'redrb_up{{namespace="{namespace}"}} 1.0' in text
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_port_in_use_is_named(real_url, monkeypatch, capsys):
    monkeypatch.setenv("REDRB_URL", real_url)
    before = signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert cli.main(["exporter", "--port", port]) == 2
    signal.signal(signal.SIGTERM, before)
    assert f"port {port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("own_server", list(programs())[:1], indirect=True)
def test_a_stopped_redis_hangs_no_scrape(real_url, own_server, namespace, monkeypatch):
    monkeypatch.setattr("redrb.watch.metrics.metric.FRESH_S", 1.0)
    redis, registry = own_server(), CollectorRegistry()
    with (
        redrb.connect(redis.url) as client,
        Observer(client, namespace, every_s=0.05) as observer,
        ExitStack() as scope,
    ):
        server, thread = start_http_server(0, "127.0.0.1", registry)
        scope.callback(thread.join)
        scope.callback(server.server_close)
        scope.callback(server.shutdown)
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        registry.register(StateCollector(observer.newest, namespace))
        assert observer.wait(0, 5).state is not None
        assert f'redrb_tasks{{namespace="{namespace}"}} 0.0' in fetched(url)
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            view = observer.newest()
            while not view.error:
                view = observer.wait(view.number, 5)
            seconds = []  # a look at Redis would take LOOK_S each time
            for _ in range(5):
                began = time.monotonic()
                text = fetched(url)
                seconds.append(time.monotonic() - began)
            assert min(seconds) < LOOK_S / 2
        finally:
            os.kill(redis.pid, signal.SIGCONT)
        assert f'redrb_up{{namespace="{namespace}"}} 0.0' in text
        assert "redrb_tasks" not in text
