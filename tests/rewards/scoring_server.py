"""A real HTTP server in a thread, which answers as a test tells it to."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Respond = Callable[[dict[str, Any]], tuple[int, Any]]
"""Request's body to status and answer; an answer of bytes is sent as it is."""


class Service:
    """What the server was asked, and how it answers: `respond` may be changed at any time."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_parallel = self.most_parallel = 0
        self.lock = threading.Lock()
        self.url = ""


def lengths(body: dict[str, Any]) -> tuple[int, Any]:
    """Scores every completion by its length."""
    return 200, {"scores": [len(sample["completion"]) for sample in body["samples"]]}


class Drip:
    """An answer sent byte by byte, each well within any socket timeout."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


@contextmanager
def serving(respond: Respond = lengths) -> Iterator[Service]:
    """Serves on a free port of this machine."""
    service = Service(respond)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with service.lock:
                service.requests.append(body)
                service.headers.append(dict(self.headers.items()))
                service.num_parallel += 1
                service.most_parallel = max(service.most_parallel, service.num_parallel)
            try:
                self.answer(*service.respond(body))
            finally:
                with service.lock:
                    service.num_parallel -= 1

        def answer(self, status: int, content: Any) -> None:
            self.send_response(status)
            if status == 302:
                self.send_header("Location", service.url)
            self.end_headers()
            if isinstance(content, Drip):
                until = time.monotonic() + content.seconds
                while time.monotonic() < until:
                    self.wfile.write(b" ")
                    time.sleep(0.05)
                return
            self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: Any) -> None:
            """A client that hangs up is part of these tests."""

    with Server(("127.0.0.1", 0), Handler) as server:
        service.url = f"http://127.0.0.1:{server.server_port}/score"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
