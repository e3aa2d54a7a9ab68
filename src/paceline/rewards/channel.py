"""Messages between the pool and a worker over one socket: a length and a pickle.

A reader takes whatever has arrived in one call and splits it, so that a burst of small messages costs one wake-up.
"""

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18


def encode(message: Any) -> bytes:
    """One message as bytes for the socket."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class MessageReader:
    """Splits a socket's bytes into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def read_available(self) -> tuple[list[Any], bool]:
        """Messages complete by now, without waiting, and whether the other side has closed."""
        messages: list[Any] = []
        while True:
            try:
                chunk = self._connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages, False
            except ConnectionResetError:
                return messages, True
            if not chunk:
                return messages, True
            self._buffer += chunk
            messages += self._complete_messages()

    def read_blocking(self) -> list[Any]:
        """Waits for at least one message. Raises `EOFError` when the other side has closed."""
        while True:
            messages = self._complete_messages()
            if messages:
                return messages
            chunk = self._connection.recv(_READ_BYTES)
            if not chunk:
                raise EOFError
            self._buffer += chunk

    def _complete_messages(self) -> list[Any]:
        messages: list[Any] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages
