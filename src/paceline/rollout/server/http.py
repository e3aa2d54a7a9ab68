"""JSON over HTTP/1.1, and streams of server-sent events. One connection per call: engines answer for seconds."""

import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit


class ServerSaidNoError(RuntimeError):
    """The server answered with a status that is no success."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"HTTP {status}: {text[:300]}")


class HttpEndpoint:
    """A server at `http://host:port`, or `https://`. Every call may raise `OSError` where nobody answers."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address, self._timeout_s = address.rstrip("/"), timeout_s
        self._parts = urlsplit(self.address)

    def _connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.netloc, timeout=timeout_s or self._timeout_s)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The body of an answer. Raises `ServerSaidNoError` for any status but success."""
        connection = self._connect(timeout_s)
        try:
            response = self._request(connection, method, path, body, query)
            text = response.read().decode("utf-8", "replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status >= 300:
            raise ServerSaidNoError(response.status, text)
        return text

    def json(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """An answer that is JSON; None where it is empty."""
        text = self.call(method, path, body, **options)
        return json.loads(text) if text.strip() else None

    def events(self, path: str, body: Any, opened: Callable[[Callable[[], None]], None]) -> Iterator[Any]:
        """The JSON of each event of a stream. `opened` is given a function that ends it from another thread."""
        connection = self._connect(None)
        try:
            connection.connect()
            socket_: socket.socket = connection.sock
            opened(lambda: _end(socket_))
            response = self._request(connection, "POST", path, body, None)
            if response.status >= 300:
                raise ServerSaidNoError(response.status, response.read().decode("utf-8", "replace"))
            for line in response:
                text = line.decode("utf-8", "replace").strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data:"):
                    yield json.loads(text.removeprefix("data:"))
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Any,
        query: dict[str, Any] | None,
    ) -> http.client.HTTPResponse:
        target = f"{self._parts.path}{path}" + (f"?{urlencode(query, doseq=True)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, target, data, {"Content-Type": "application/json"})
        return connection.getresponse()


def _end(connected: socket.socket) -> None:
    """Wakes a thread that reads from a connection, which then finds its end; closing alone would not."""
    with contextlib.suppress(OSError):  # ended already
        connected.shutdown(socket.SHUT_RDWR)
