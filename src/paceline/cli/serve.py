"""`paceline serve RUN|MODEL`: an OpenAI-compatible server."""

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.config import ConfigError

KEY_VARIABLE = "PACELINE_API_KEY"


def serve(
    source: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="Folder of a run, or a model.")],
    name: Annotated[str | None, typer.Option(help="Model name in requests; default: the folder's.")] = None,
    host: Annotated[str, typer.Option(help="Address; others than loopback need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"File with the key clients must send; default: ${KEY_VARIABLE}.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, native, float32 or bfloat16.")] = "auto",
    max_running: Annotated[int, typer.Option(min=1, help="Choices decoded together.")] = 64,
    kv_cache_gb: Annotated[float | None, typer.Option(help="Bound on the KV cache, GiB.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of one choice.")] = 4096,
    max_body_mb: Annotated[float, typer.Option(help="Largest request body, MiB.")] = 4.0,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Most choices in progress.")] = 512,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Rate limit per client; default: none.")
    ] = None,
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    missing = [package for package in ("starlette", "uvicorn") if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError("serve", ", ".join(missing), "not installed: pip install 'paceline[serve]'")
    if kv_cache_gb is not None and not kv_cache_gb > 0:
        raise ConfigError("--kv-cache-gb", kv_cache_gb, "must be above 0")
    if not max_body_mb > 0:
        raise ConfigError("--max-body-mb", max_body_mb, "must be above 0")
    from paceline.serve.guard import ServeLimits
    from paceline.serve.server import ServeSettings
    from paceline.serve.server import serve as run_server

    limits = ServeLimits(
        max_body_bytes=int(max_body_mb * 2**20),
        max_in_flight=max_in_flight,
        requests_per_minute=requests_per_minute,
        max_new_tokens=max_new_tokens,
    )
    run_server(
        ServeSettings(
            source=source,
            name=name,
            host=host,
            port=port,
            api_key=_api_key(api_key_file),
            device=device,
            dtype=dtype,
            max_running=max_running,
            kv_cache_gb=kv_cache_gb,
            limits=limits,
        )
    )


def _api_key(path: Path | None) -> str | None:
    """The key, never from the command line, which every user of the machine can read."""
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError("--api-key-file", str(path), f"cannot be read ({error.strerror})") from error
    if not key:
        raise ConfigError("--api-key-file", str(path), "must hold a key")
    return key
