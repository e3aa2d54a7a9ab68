"""From a run or a model to a server that answers: weights, engine, its thread, and the HTTP server."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from transformers import PreTrainedTokenizerBase

from paceline.config import Config, ConfigError, load_config
from paceline.config.schema import ModelSection
from paceline.model.loading import CausalModel, load_model, load_tokenizer, resolve_device
from paceline.rollout import StreamingEngine
from paceline.rollout.native.choice import open_native_engine
from paceline.rollout.native.engine import EngineLimits
from paceline.serve.app import ServeApp, ServedModel
from paceline.serve.engine_loop import EngineLoop
from paceline.serve.guard import ServeLimits, is_loopback
from paceline.telemetry.ledger import Ledger

_STOP_S = 10.0
"""How long open connections may take to end once the server is asked to."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Where to listen, what to serve as, and how much. `kv_cache_gb` None: no bound on the cache."""

    source: Path | str
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_running: int = 64
    prefill_token_budget: int = 8192
    kv_cache_gb: float | None = None
    limits: ServeLimits = field(default_factory=ServeLimits)

    def check(self) -> None:
        """Raises `ConfigError` for an address that others reach without a key in front."""
        if self.api_key is None and not is_loopback(self.host):
            rule = (
                "others can reach this address, so a key is required: set PACELINE_API_KEY or --api-key-file"
            )
            raise ConfigError("--host", self.host, rule, "127.0.0.1")


def serve(settings: ServeSettings) -> None:
    """Serves until interrupted.

    Raises:
        ConfigError: the source holds no model, or the address needs a key.
    """
    settings.check()
    with listening(settings.host, settings.port) as listener:
        ledger = Ledger()
        engine, model = load_served(settings, ledger)
        loop = EngineLoop(engine)
        app = ServeApp(loop, model, settings.limits, settings.api_key)
        host, port = listener.getsockname()[:2]
        print(f"{model.name}: http://{host}:{port}/v1 (Ctrl-C ends it)", flush=True)
        with engine_thread(loop, ledger):
            _uvicorn(app).run(sockets=[listener])


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket; port 0 takes a free one. Raises `ConfigError` where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)  # who connects before the server runs waits for it
        except OSError as error:
            raise ConfigError(
                "--port", port, f"{host}:{port} cannot be had ({error.strerror})", "0"
            ) from error
        yield listener


@contextmanager
def engine_thread(loop: EngineLoop, ledger: Ledger) -> Iterator[None]:
    """The loop runs in a thread of its own inside; the engine's ledger is that thread's."""

    def run() -> None:
        try:
            ledger.adopt()
            loop.run()
        finally:
            loop.give_up()

    thread = threading.Thread(target=run, name="engine", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.close()
        thread.join()


@contextmanager
def http_thread(app: ServeApp) -> Iterator[str]:
    """The application on a free loopback port, served by a thread; its address, without a path."""
    with ExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1", 0))
        server = _uvicorn(app)
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def _uvicorn(app: ServeApp) -> uvicorn.Server:
    config = uvicorn.Config(
        app.asgi,
        log_level="warning",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(_STOP_S),
        h11_max_incomplete_event_size=64 * 1024,
    )
    return uvicorn.Server(config)


def load_served(settings: ServeSettings, ledger: Ledger) -> tuple[StreamingEngine, ServedModel]:
    """Weights of a run (its export) or a model, in an engine, and what the server says about them."""
    path = Path(settings.source)
    config = load_config(path / "config.yaml") if (path / "config.yaml").is_file() else None
    section = _model_section(settings, config)
    tokenizer = load_tokenizer(section)
    model = load_model(section, resolve_device(settings.device))
    limits = EngineLimits(
        settings.max_running,
        settings.prefill_token_budget,
        None if settings.kv_cache_gb is None else int(settings.kv_cache_gb * 2**30),
    )
    engine = open_native_engine(model, tokenizer, "auto", limits, ledger)
    name = settings.name or (config.run.name if config else path.name)
    stops = stop_tokens(model, tokenizer) | set(config.rollout.stop_token_ids if config else ())
    temperature = config.rollout.temperature if config else 1.0
    return engine, ServedModel(name, tokenizer, stops, model.max_context, temperature)


def _model_section(settings: ServeSettings, config: Config | None) -> ModelSection:
    """What to load: a run's exported weights with its template and limits, or the model as it is."""
    values: Mapping[str, object] = {"dtype": settings.dtype}
    if config is None:
        return ModelSection.model_validate({"path": str(settings.source), **values})
    export = Path(settings.source) / "export"
    if not (export / "config.json").is_file():
        rule = "the run has exported no weights; it does at its end, with checkpoint.export_hf=true"
        raise ConfigError("RUN", str(settings.source), rule, config.model.path)
    kept = {"chat_template": config.model.chat_template, "max_context": config.model.max_context}
    return ModelSection.model_validate({"path": str(export), **values, **kept})


def stop_tokens(model: CausalModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End tokens of the tokenizer and of the model's own generation settings."""
    generation = model.module.generation_config
    stated = None if generation is None else generation.eos_token_id
    found = stated if isinstance(stated, list) else [stated]
    return frozenset(token for token in (*found, tokenizer.eos_token_id) if token is not None)
