"""Messages between a run and an engine's process over one socket: a length and a JSON object.

JSON, not pickle: the two sides may be different Python versions with different packages. Floats survive exactly.
"""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18

Message = dict[str, Any]


def send_frame(connection: socket.socket, message: Message) -> None:
    """Sends one message; blocks while the socket's buffer is full. Raises `OSError` when the other side is gone."""
    body = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


class FrameReader:
    """Splits a blocking socket's bytes into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, bytearray()

    def read(self, wait: bool) -> list[Message]:
        """Messages that have arrived; with `wait`, at least one. Raises `EOFError` when the other side has closed."""
        while True:
            try:
                chunk = self._connection.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return []
            except ConnectionResetError as error:
                raise EOFError from error
            if not chunk:
                raise EOFError
            self._buffer += chunk
            messages = self._complete_messages()
            if messages or not wait:
                return messages

    def _complete_messages(self) -> list[Message]:
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(json.loads(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages
