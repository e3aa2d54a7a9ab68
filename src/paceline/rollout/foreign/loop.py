"""The main loop of an engine's process: take orders between rounds, send what each round added.

Orders (run to engine): `submit`, `abort`, and calls with an answer (`load`, `sleep`, `wake`, `stats`, `score`).
News (engine to run): `ready` once, `tokens` after rounds, `answer` or `error` for each call.
"""

import socket
from typing import Any, Protocol

from paceline.rollout.foreign.frames import FrameReader, Message, send_frame

TokenRow = list[Any]
"""[request id, sample index, new token ids, their log-probs, finish reason or None]."""


class WorkerEngine(Protocol):
    """What an engine's process runs. `call` answers with something JSON can hold, and may raise to refuse."""

    @property
    def version(self) -> int:
        """Weight version that the next token is sampled under; goes out with every token."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        ...

    def submit(self, order: Message) -> None:
        """Takes id, prompt, samples (seed, prefix, ended), max_new_tokens, temperature, stop, ignore_stop."""
        ...

    def abort(self, request_id: int) -> list[TokenRow]:
        """Ends what a request has not finished; a row with finish reason "abort" for each such sample."""
        ...

    def step(self) -> list[TokenRow]:
        """One round."""
        ...

    def call(self, name: str, arguments: Message) -> Any:
        """An order with an answer."""
        ...


def serve(connection: socket.socket, engine: WorkerEngine, facts: Message) -> None:
    """Serves until the run closes its side of the socket. `facts` go out with `ready`."""
    reader = FrameReader(connection)
    send_frame(connection, {"ready": facts})
    while True:
        try:
            orders = reader.read(wait=not engine.has_work)
        except EOFError:
            return
        for order in orders:
            _obey(connection, engine, order)
        if engine.has_work and (rows := engine.step()):
            send_frame(connection, {"tokens": rows, "version": engine.version})


def _obey(connection: socket.socket, engine: WorkerEngine, order: Message) -> None:
    kind = order["order"]
    if kind == "submit":
        engine.submit(order)
    elif kind == "abort":
        send_frame(connection, {"tokens": engine.abort(order["id"]), "version": engine.version})
    elif kind == "call":
        try:
            answer = engine.call(order["name"], order["arguments"])
        except Exception as error:  # whatever an engine raises is the answer; the run decides what follows
            send_frame(connection, {"call": order["call"], "error": f"{type(error).__name__}: {error}"})
        else:
            send_frame(connection, {"call": order["call"], "answer": answer})
    else:
        raise ValueError(f"unknown order {kind!r}")
