"""vLLM driven round by round, in its own process or in the trainer's: submit, abort, step, load, sleep, wake.

Everything of vLLM's that paceline touches is in this file, `vllm_extension.py` and `vllm/server.py`.
"""

import hashlib
import struct
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from paceline.rollout.foreign.frames import Message
from paceline.rollout.foreign.loop import TokenRow

_PROBE = [11, 7, 5, 3, 13, 17, 23, 19, 29, 31, 37, 41]
"""Token ids whose log-probs tell weights apart where parameters are out of sight; every vocabulary has them."""

_COUNTERS = {
    "vllm:num_preemptions": "num_preemptions",
    "vllm:prefix_cache_hits": "num_cached_tokens",
    "vllm:prompt_tokens": "num_prompt_tokens",
    "vllm:generation_tokens": "num_generated_tokens",
}


class VllmCore:
    """A `WorkerEngine` over one vLLM engine. `arguments` are vLLM's own engine arguments."""

    def __init__(self, arguments: Message, sleep_level: int) -> None:
        self.version = 0
        self.is_cpu = current_platform.is_cpu()
        can_sleep = sleep_level > 0 and not self.is_cpu
        self._sleep_level = sleep_level if can_sleep else 0
        self._llm = LLM(**arguments, enable_sleep_mode=can_sleep)
        self._engine = self._llm.llm_engine
        self._running: dict[str, tuple[int, int]] = {}
        self._requests: dict[int, set[str]] = {}
        self._stash: list[TokenRow] = []
        self._received: str | None = None
        self._asleep: set[str] = set()
        self._num_steps = self._num_rows = self._num_probes = 0

    @property
    def facts(self) -> Message:
        """What a run has to know."""
        config = self._engine.vllm_config
        return {
            "engine": "vllm",
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": "cpu" if self.is_cpu else current_platform.device_type,
            "takes_seeds": not self.is_cpu,
            "can_sleep": self._sleep_level > 0,
            "scores": True,
            "needs_weights": True,
            "max_model_len": config.model_config.max_model_len,
        }

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs or has not been reported."""
        return bool(self._running or self._stash)

    def submit(self, order: Message) -> None:
        """One vLLM request per sample: the prefix cache computes their prompt once. The cache's key holds the weight
        version, so that a prompt computed under old weights is never used under new ones."""
        if self._asleep:
            raise RuntimeError("asleep: generating now would never end")
        for index, sample in enumerate(order["samples"]):
            if sample["ended"] is not None:
                self._stash.append([order["id"], index, [], [], sample["ended"]])
                continue
            params = self._params(order, sample)
            prompt = {
                "prompt_token_ids": [*order["prompt"], *sample["prefix"]],
                "cache_salt": f"weights-{self.version}",
            }
            name = f"{order['id']}-{index}"
            self._engine.add_request(name, prompt, params)
            self._running[name] = (order["id"], index)
            self._requests.setdefault(order["id"], set()).add(name)

    def _params(self, order: Message, sample: Message) -> Any:
        remaining = order["max_new_tokens"] - len(sample["prefix"])
        # on a CPU a seed of one request ends the engine: its sampler has no generators
        seed = None if self.is_cpu or order["temperature"] == 0 else sample["seed"] % 2**63
        return SamplingParams(
            temperature=order["temperature"],
            max_tokens=remaining,
            # the run says which tokens end a sample; min_tokens would take their probability away from the others
            ignore_eos=True,
            stop_token_ids=[] if order["ignore_stop"] else order["stop"],
            logprobs=0,
            seed=seed,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def abort(self, request_id: int) -> list[TokenRow]:
        """Ends what has not finished."""
        names = self._requests.pop(request_id, set())
        self._engine.abort_request(sorted(names))
        return [[*self._running.pop(name), [], [], "abort"] for name in sorted(names)]

    def step(self) -> list[TokenRow]:
        """One scheduling round of vLLM."""
        rows, self._stash = self._stash, []
        if self._running:
            new = self._round()
            self._num_steps += 1
            self._num_rows += len(new)
            rows += new
        return rows

    def _round(self) -> list[TokenRow]:
        return [row for output in self._engine.step() for row in self._rows_of(output)]

    def _rows_of(self, output: Any) -> list[TokenRow]:
        key = self._running.get(output.request_id)
        if key is None:
            return []  # aborted in between
        (part,) = output.outputs
        tokens = list(part.token_ids)
        chosen = [entry[token].logprob for entry, token in zip(part.logprobs or [], tokens, strict=True)]
        if part.finish_reason is not None:
            del self._running[output.request_id]
            self._requests[key[0]].discard(output.request_id)
            if not self._requests[key[0]]:
                del self._requests[key[0]]
        return [[*key, tokens, chosen, part.finish_reason]]

    def call(self, name: str, arguments: Message) -> Any:
        """An order with an answer; see the methods."""
        if name == "load":
            return self.load("paceline_load", (arguments["paths"],), arguments["version"])
        if name == "load_tensors":
            return self.load("paceline_load_tensors", (arguments["weights"],), arguments["version"])
        if name == "load_ipc":
            return self.load("paceline_load_ipc", (arguments["handles"],), arguments["version"])
        if name == "score":
            return [self.score(tokens) for tokens in arguments["prompts"]]
        return {"stats": self.stats, "sleep": self.sleep, "wake": self.wake}[name]()

    def load(self, method: str, arguments: tuple[Any, ...], version: int) -> Message:
        """Loads weights through the worker extension and empties the prefix cache. What runs goes on under the new
        weights, with the keys and values it has."""
        if "weights" in self._asleep:
            self._wake("weights")
        probe = None if self._asleep else self._probe_digest()
        answers = self._engine.collective_rpc(method, args=arguments)
        answer = dict(answers[0])
        if any(one["received"] != answer["received"] for one in answers):
            raise RuntimeError(f"workers received different weights: {[one['received'] for one in answers]}")
        self._engine.reset_prefix_cache()
        if answer["before"] is None and probe is not None:
            answer.update(before=probe, after=self._probe_digest())
        answer["received_before"], self._received = self._received, answer["received"]
        answer["is_awake"] = not self._asleep
        self.version = version
        return answer

    def _probe_digest(self) -> str:
        values = self.score(_PROBE)
        return hashlib.blake2b(struct.pack(f"{len(values)}d", *values), digest_size=16).hexdigest()

    def score(self, tokens: list[int]) -> list[float]:
        """Log-probs, at temperature 1, of all tokens but the first given those before them."""
        self._num_probes += 1
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        name, entries = f"probe-{self._num_probes}", None
        self._engine.add_request(name, {"prompt_token_ids": tokens}, params)
        while entries is None:
            for output in self._engine.step():
                if output.request_id == name:
                    entries = output.prompt_logprobs if output.finished else None
                else:  # of a sample that runs meanwhile: goes out with the next round
                    self._stash += self._rows_of(output)
        return [entries[i][tokens[i]].logprob for i in range(1, len(tokens))]

    def sleep(self) -> None:
        """Gives memory back, where the build can."""
        if self._sleep_level:
            self._engine.sleep(level=self._sleep_level)
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Takes the memory again; what fails half-way leaves everything asleep."""
        for tag in ("weights", "kv_cache"):
            if tag in self._asleep:
                self._wake(tag)

    def _wake(self, tag: str) -> None:
        try:
            self._engine.wake_up(tags=[tag])
        except BaseException:
            # level 1: weights that are back already go to the host, not away, so that another wake-up finds them
            self._engine.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}
            raise
        self._asleep.discard(tag)

    def stats(self) -> Message:
        """Counters since the start. vLLM itself counts preemptions, cache hits and tokens."""
        found: Message = dict.fromkeys(_COUNTERS.values(), 0)
        for metric in self._llm.get_metrics():
            if metric.name in _COUNTERS:
                found[_COUNTERS[metric.name]] += int(metric.value)
        cache = self._engine.vllm_config.cache_config
        prompt_tokens = found["num_prompt_tokens"]
        return {
            **found,
            "num_prefill_tokens": max(0, prompt_tokens - found["num_cached_tokens"]),
            "num_decode_steps": self._num_steps,
            "num_slot_steps": self._num_rows,
            "num_slots": self._engine.vllm_config.scheduler_config.max_num_seqs,
            "cache_bytes": int(getattr(cache, "kv_cache_memory_bytes", None) or 0),
        }
