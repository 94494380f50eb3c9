"""`redrb exporter`: serves the metrics of a namespace to Prometheus."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import suppress
from importlib.resources import files

from redrb.cli.arguments import Commands, add_command, add_flag
from redrb.cli.output import show
from redrb.errors import ConfigError
from redrb.words import bracketed

PORT = 9464
FIRST_LOOK_S = 5.0
"""Longest wait for the first figures before they are printed, or their address is."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    text = (
        "serve the metrics of a namespace to Prometheus. It serves them until Ctrl-C. "
        "While Redis does not answer, redrb_up is 0 and old figures are left out. "
        "docs/reference/metrics.md lists all metrics. Needs prometheus-client (redrb's extra "
        "metrics)."
    )
    json_text = "print the address, or the metrics of --once, as one line of JSON"
    parser = add_command(commands, "exporter", text, _run, subject=None, json_text=json_text)
    parser.add_argument("--port", type=int, default=PORT, help=f"port (default: {PORT}); 0: any")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, only this machine); 0.0.0.0: all",
    )
    parser.add_argument("--task", help="only this task, for a user who may not read the registry")
    only = parser.add_mutually_exclusive_group()
    add_flag(only, "--once", "print the metrics once, and end")
    add_flag(only, "--print-alerts", "print alert rules for Prometheus, and end")
    add_flag(only, "--print-dashboard", "print a Grafana dashboard, and end")


def _run(options: argparse.Namespace) -> int:
    if options.print_alerts or options.print_dashboard:
        name = "alerts.yml" if options.print_alerts else "grafana.json"
        sys.stdout.write(files("redrb.watch.metrics").joinpath(name).read_text(encoding="utf-8"))
        return 0
    from redrb.checks import require_package

    require_package("prometheus_client", extra="metrics")
    from prometheus_client import CollectorRegistry, generate_latest, start_http_server

    from redrb.connection import connect
    from redrb.watch.metrics.metric import StateCollector
    from redrb.watch.state.observer import Observer

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    registry = CollectorRegistry()
    with (
        connect(options.url) as client,
        Observer(client, options.namespace, options.task) as observer,
    ):
        registry.register(StateCollector(observer.newest, options.namespace))
        if options.once:
            found = observer.wait(0, FIRST_LOOK_S).state is not None
            samples = [sample for family in registry.collect() for sample in family.samples]
            result = [
                {"name": sample.name, "labels": sample.labels, "value": sample.value}
                for sample in samples
            ]
            text = generate_latest(registry).decode().splitlines()
            show({"metrics": result}, text, as_json=options.json)
            return 0 if found else 1
        try:
            server, _ = start_http_server(options.port, options.host, registry)
        except OSError as error:
            raise ConfigError(
                f"no metrics can be served at {options.host} port {options.port}: "
                f"{error.strerror}. Give another port or host."
            ) from error
        with suppress(KeyboardInterrupt):
            observer.wait(0, FIRST_LOOK_S)
            url = f"http://{bracketed(options.host)}:{server.server_port}/metrics"
            line = f"The metrics of namespace {options.namespace} are at {url} until Ctrl-C."
            show({"url": url}, [line], as_json=options.json)
            signal.pause()
    return 0
