"""SGLang's native HTTP API as an engine. **Unverified**: tested against a conversation written from its documentation
(docs.sglang.io: "SGLang Native APIs", "SGLang for RL Systems"), never against a running server.

The server must see the folder that weights are written to, and be started with `--enable-memory-saver` where it is to
sleep. It reports log-probs of the distribution sampled from, temperature included, which is its default.
"""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from paceline.rollout.foreign.frames import Message
from paceline.rollout.server.http import HttpEndpoint


class SglangApi:
    """A `ServerApi` over SGLang's server."""

    def __init__(self, endpoint: HttpEndpoint, can_sleep: bool) -> None:
        self.endpoint, self._can_sleep = endpoint, can_sleep
        self._num_generated = self._num_prompt = self._num_cached = 0
        self._version = 0
        self._counting = threading.Lock()

    def facts(self) -> Message:
        """Model and versions of the server."""
        self.endpoint.call("GET", "/health")
        info = self.endpoint.json("GET", "/get_server_info")
        return {
            "engine": "sglang",
            "sglang": info.get("version"),
            "takes_seeds": True,
            "can_sleep": self._can_sleep,
            "scores": True,
            "needs_weights": True,
            "max_model_len": info.get("context_length"),
        }

    def generate(
        self, order: Message, index: int, opened: Callable[[Callable[[], None]], None]
    ) -> Iterator[tuple[list[int], list[float], str | None]]:
        """One sample's stream; `output_token_logprobs` holds (log-prob, token id, text) of the tokens so far."""
        sample, request_id = order["samples"][index], f"paceline-{order['id']}-{index}-{self._version}"
        remaining = order["max_new_tokens"] - len(sample["prefix"])
        sampling = {
            "temperature": order["temperature"],
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": remaining,
            "stop_token_ids": [] if order["ignore_stop"] else order["stop"],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "sampling_seed": sample["seed"] % 2**31,
        }
        body = {
            "rid": request_id,
            "input_ids": [*order["prompt"], *sample["prefix"]],
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
        }

        def opened_here(end: Callable[[], None]) -> None:
            def abort() -> None:
                self.endpoint.call("POST", "/abort_request", {"rid": request_id})
                end()

            opened(abort)

        num_seen = 0
        for chunk in self.endpoint.events("/generate", body, opened_here):
            if "error" in chunk:
                raise ConnectionError(f"the stream ended with {chunk['error']}")
            meta = chunk["meta_info"]
            total = meta["completion_tokens"]
            entries = meta["output_token_logprobs"]
            fresh = entries[len(entries) - (total - num_seen) :] if total > num_seen else []
            num_seen = total
            reason = meta.get("finish_reason")
            if reason:  # counted before the last tokens go out: what is over is in the statistics
                with self._counting:
                    self._num_generated += num_seen
                    self._num_prompt += meta["prompt_tokens"]
                    self._num_cached += meta.get("cached_tokens", 0)
            finish = reason["type"] if reason else None
            yield [entry[1] for entry in fresh], [entry[0] for entry in fresh], finish

    def call(self, name: str, arguments: Message) -> Any:
        """See `ServerApi.call`."""
        if name == "load":
            return self._load(arguments["paths"], arguments["version"])
        if name == "score":
            return [self._score(tokens) for tokens in arguments["prompts"]]
        return {"stats": self._stats, "sleep": self._sleep, "wake": self._wake}[name]()

    def _load(self, paths: list[str], version: int) -> Message:
        """Loads the folder of the files and empties the radix cache. SGLang cannot say what it received, so that its
        label of the version is checked here, and its log-probs by the run after every load."""
        if self._can_sleep:
            self.endpoint.call("POST", "/resume_memory_occupation", {"tags": ["weights"]})
        body = {
            "model_path": os.path.dirname(paths[0]),
            "load_format": "safetensors",
            "flush_cache": True,
            "weight_version": str(version),
        }
        answer = self.endpoint.json("POST", "/update_weights_from_disk", body)
        if not answer["success"]:
            raise RuntimeError(answer["message"])
        label = self.endpoint.json("GET", "/get_model_info").get("weight_version")
        if label is not None and label != str(version):
            raise RuntimeError(f"the server holds weight version {label} after loading {version}")
        self._version = version
        return {"received": None, "version": version, "is_awake": not self._can_sleep}

    def _score(self, tokens: list[int]) -> list[float]:
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = self.endpoint.json("POST", "/generate", body)
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    def _sleep(self) -> None:
        if self._can_sleep:
            self.endpoint.call("POST", "/release_memory_occupation", {})

    def _wake(self) -> None:
        if not self._can_sleep:
            return
        try:
            self.endpoint.call("POST", "/resume_memory_occupation", {})
        except Exception:
            self.endpoint.call("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})
            raise

    def _stats(self) -> Message:
        return {
            "num_generated_tokens": self._num_generated,
            "num_prompt_tokens": self._num_prompt,
            "num_cached_tokens": self._num_cached,
            "num_prefill_tokens": self._num_prompt - self._num_cached,
            "cache_bytes": 0,
            "num_slots": 0,
        }
