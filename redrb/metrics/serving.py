"""`MetricsServer`: serves a registry of Prometheus at /metrics, and /healthz."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from redrb.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

REQUEST_S = 5.0
"""Seconds after which a client that sends no request is disconnected."""


class MetricsServer:
    """An HTTP server in a thread; it ends with `close`, or with the process.

    Attributes:
        url: Address of the metrics.
    """

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        """Begin to serve.

        Args:
            registry: The metrics.
            host: Address to listen on; 127.0.0.1: only this machine, 0.0.0.0: all interfaces.
            port: Port; 0: a free one.

        Raises:
            ConfigError: The address cannot be used.
        """
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            kind = type("_Server", (_Server,), {"address_family": family})
            self._server: WSGIServer = make_server(
                *(str(address[0]), port, _app(registry)), kind, handler_class=_Handler
            )
        except OSError as error:
            raise ConfigError(
                f"no metrics can be served at {host} port {port}: {error.strerror}. Give another "
                "port or host."
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="redrb-metrics", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Serve no more; requests that are under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each request in a thread that does not keep the process alive."""

    daemon_threads = True
    block_on_close = False


class _Handler(WSGIRequestHandler):
    """Handles a request without a line in the log."""

    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name of the base)
        """Write nothing."""


def _app(registry: CollectorRegistry) -> WSGIApplication:
    metrics: Any = make_wsgi_app(registry)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            found: Iterable[bytes] = metrics(environ, start_response)
            return found
        status, text = {
            "/healthz": ("200 OK", b"ok\n"),
            "/": ("200 OK", b"The metrics are at /metrics.\n"),
        }.get(path, ("404 Not Found", b"There are only /metrics and /healthz.\n"))
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [text]

    return app
