"""Stop at the next boundary: SIGTERM, or the first SIGINT, asks; a second SIGINT aborts."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """While entered, SIGTERM and SIGINT set a flag that the loop polls at its boundaries.

        with StopRequest() as stop:
            for step in steps:
                ...
                if stop.requested:
                    save(); break

    A second SIGINT raises KeyboardInterrupt where the program is. On exit the earlier handlers are back. Python
    delivers signals to the main thread only: entered from another thread, nothing is installed
    (`installed` is False) and `request()` is the one way to ask.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal_name: str | None = None
        """The signal that asked first, such as SIGTERM."""
        self.installed = False
        self._previous: dict[signal.Signals, Any] = {}

    def request(self, signal_name: str | None = None) -> None:
        """Asks to stop at the next boundary."""
        if not self.requested:
            self.requested, self.signal_name = True, signal_name

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
            self.installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: installed by other than Python code, which cannot be put back from here
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
        self.installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # a parent's SIGTERM after a person's SIGINT must not abort the save that is under way
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)
