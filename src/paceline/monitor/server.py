"""The OpenMetrics endpoint: one small HTTP server over a run's files."""

import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.config.errors import ConfigError
from paceline.monitor.following import RunFollower
from paceline.monitor.openmetrics import CONTENT_TYPE, exposition

PATH = "/metrics"
_MAX_PORT = 65535
_TRIED_PORTS = 64


class _Server(socketserver.ThreadingTCPServer):
    """Not http.server's own class: that one asks the resolver for the host's name before it listens."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class MetricsServer:
    """Serves `http://host:port/metrics` until it is closed; `port` 0 takes any free one.

    A scrape reads what the run's files have gained since the one before, on a thread of its own: the process that
    trains does nothing for it, and the endpoint of a finished run is the same code.
    """

    def __init__(
        self, run_dir: Path, port: int, host: str = "127.0.0.1", key: str = "telemetry.metrics_port"
    ) -> None:
        """Binds the port.

        Raises:
            ConfigError: the port is taken or may not be used; `key` is named, with the nearest port that is free.
        """
        self._run = RunFollower(run_dir)
        self._lock = threading.Lock()
        try:
            self._server = self._bound(host, port)
        except OSError as error:
            nearest = self._nearest_free(host, port)
            raise ConfigError(key, port, f"{host}:{port}: {error.strerror or error}", nearest) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics endpoint", daemon=True
        )

    @property
    def url(self) -> str:
        """Where to scrape."""
        host, port = self._server.socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

    def text(self) -> str:
        """The exposition of the run as its files are now."""
        with self._lock:
            self._run.poll()
            return exposition(self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _bound(self, host: str, port: int) -> "_Server":
        return _Server((host, port), _handler(self))

    def _nearest_free(self, host: str, port: int) -> str | None:
        for other in range(port + 1, min(port + _TRIED_PORTS, _MAX_PORT) + 1):
            try:
                self._bound(host, other).server_close()
            except OSError:
                continue
            return str(other)
        return None


def _handler(endpoint: MetricsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "paceline"
        sys_version = ""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in (PATH, "/"):
                self.send_error(404, f"metrics are at {PATH}")
                return
            try:
                content = endpoint.text()
            except (
                ValueError,
                KeyError,
                OSError,
            ) as error:  # records that cannot be read; the next scrape tries again
                self.send_error(500, f"{type(error).__name__}: {error}".replace("\n", " "))
                return
            body = content.encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not logged: there is one every few seconds."""

    return Handler
