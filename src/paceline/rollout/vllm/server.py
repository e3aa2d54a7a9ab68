"""vLLM's OpenAI-compatible server as an engine: completions by token ids, and its development endpoints for weights.

The server must have been started with paceline's worker extension and `VLLM_SERVER_DEV_MODE=1`; `server_command` says
how. Only loopback or a trusted network: who reaches these endpoints can load weights.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.config.engine_schema import VllmSection
from paceline.rollout.foreign.frames import Message
from paceline.rollout.server.http import HttpEndpoint
from paceline.rollout.vllm.arguments import ServedModel, engine_arguments, process_environment

_COUNTERS = {
    "vllm:num_preemptions_total": "num_preemptions",
    "vllm:prefix_cache_hits_total": "num_cached_tokens",
    "vllm:prompt_tokens_total": "num_prompt_tokens",
    "vllm:generation_tokens_total": "num_generated_tokens",
}


class VllmServerApi:
    """A `ServerApi` over vLLM's server. `takes_seeds` is False for a CPU build, which a seed would end."""

    def __init__(self, endpoint: HttpEndpoint, takes_seeds: bool, sleep_level: int) -> None:
        self.endpoint, self._takes_seeds, self._sleep_level = endpoint, takes_seeds, sleep_level
        self._model = ""
        self._version = 0
        self._received: str | None = None

    def facts(self) -> Message:
        """Model name, context and version of the server."""
        self.endpoint.call("GET", "/health")
        (model, *_) = self.endpoint.json("GET", "/v1/models")["data"]
        self._model = model["id"]
        version = self.endpoint.json("GET", "/version")["version"]
        return {
            "engine": "vllm",
            "vllm": version,
            "takes_seeds": self._takes_seeds,
            "can_sleep": self._sleep_level > 0,
            "scores": True,
            "needs_weights": True,
            "max_model_len": model.get("max_model_len"),
        }

    def generate(
        self, order: Message, index: int, opened: Callable[[Callable[[], None]], None]
    ) -> Iterator[tuple[list[int], list[float], str | None]]:
        """One sample's stream. Token ids come back as ids, never as text to be tokenised again."""
        sample = order["samples"][index]
        remaining = order["max_new_tokens"] - len(sample["prefix"])
        body = {
            "model": self._model,
            "prompt": [*order["prompt"], *sample["prefix"]],
            "max_tokens": remaining,
            "temperature": order["temperature"],
            "top_p": 1.0,
            "stop_token_ids": [] if order["ignore_stop"] else order["stop"],
            "ignore_eos": True,
            "logprobs": 1,
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": f"weights-{self._version}",
        }
        if self._takes_seeds and order["temperature"] > 0:
            body["seed"] = sample["seed"] % 2**63
        for chunk in self.endpoint.events("/v1/completions", body, opened):
            if "error" in chunk:
                raise ConnectionError(f"the stream ended with {chunk['error']}")
            for choice in chunk.get("choices", ()):
                tokens = list(choice.get("token_ids") or ())
                logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
                if tokens or choice["finish_reason"]:
                    if len(tokens) != len(logprobs):
                        raise ConnectionError(f"{len(logprobs)} log-probs for {len(tokens)} tokens")
                    yield tokens, logprobs, choice["finish_reason"]

    def call(self, name: str, arguments: Message) -> Any:
        """See `ServerApi.call`."""
        if name == "load":
            return self._load(arguments["paths"], arguments["version"])
        if name == "score":
            return [self._score(tokens) for tokens in arguments["prompts"]]
        return {"stats": self._stats, "sleep": self._sleep, "wake": self._wake}[name]()

    def _load(self, paths: list[str], version: int) -> Message:
        if self._sleep_level:
            self.endpoint.call("POST", "/wake_up", query={"tags": ["weights"]})
        body = {"method": "paceline_load", "args": [paths]}
        results = self.endpoint.json("POST", "/collective_rpc", body)["results"]
        self.endpoint.call("POST", "/reset_prefix_cache")
        before, self._received = self._received, results[0]["received"]
        self._version = version
        return {
            **results[0],
            "received_before": before,
            "version": version,
            "is_awake": not self._sleep_level,
        }

    def _score(self, tokens: list[int]) -> list[float]:
        body = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        (choice,) = self.endpoint.json("POST", "/v1/completions", body)["choices"]
        entries = choice["prompt_logprobs"]
        return [entries[i][str(tokens[i])]["logprob"] for i in range(1, len(tokens))]

    def _sleep(self) -> None:
        if self._sleep_level:
            self.endpoint.call("POST", "/sleep", query={"level": self._sleep_level})

    def _wake(self) -> None:
        if not self._sleep_level:
            return
        try:
            self.endpoint.call("POST", "/wake_up")
        except Exception:
            self.endpoint.call("POST", "/sleep", query={"level": 1})  # all or nothing, weights kept
            raise

    def _stats(self) -> Message:
        found: Message = dict.fromkeys(_COUNTERS.values(), 0)
        for line in self.endpoint.call("GET", "/metrics").splitlines():
            name, _, rest = line.partition("{")
            if name in _COUNTERS:
                found[_COUNTERS[name]] += int(float(rest.rsplit(" ", 1)[1]))
        prefill = max(0, found["num_prompt_tokens"] - found["num_cached_tokens"])
        return {**found, "num_prefill_tokens": prefill, "cache_bytes": 0, "num_slots": 0}


def server_command(python: str, arguments: Message, port: int, sleep_level: int) -> list[str]:
    """The command that serves vLLM on loopback with paceline's extension, from `engine_arguments`."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if (
            name in ("skip_tokenizer_init", "disable_log_stats") or value is None
        ):  # it makes texts, and statistics
            continue
        if value is True:
            command.append(flag)
        elif value is False:
            command.append("--no-" + flag.removeprefix("--"))
        else:
            command += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*command, "--enable-sleep-mode"] if sleep_level else command


def start_server(
    settings: VllmSection, model: ServedModel, devices: tuple[str, ...], log: Path, sleep_level: int
) -> "tuple[subprocess.Popen[bytes], str]":
    """Starts a server on a free port of loopback, and says where; it serves some time later."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    command = server_command(
        settings.python or sys.executable, engine_arguments(settings, model), port, sleep_level
    )
    environment = {**os.environ, **process_environment(settings, devices), "VLLM_SERVER_DEV_MODE": "1"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # a server's engine is a process of its own
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    return process, f"http://127.0.0.1:{port}"
