"""vLLM as paceline's rollout engine on one H200: rollout speed through the engine, and what a load of weights costs.

    python benchmarks/vllm_h200.py --shape qwen3-0.6b --python VENV/bin/python > benchmarks/results/h200/vllm.json

Random weights, forced lengths, log-prob of every sampled token, the group workload of docs/performance.md (64 prompts x
8 samples, 256 in, 512 out). Prints one JSON object. Not run yet: written for vLLM 0.24.0.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from paceline.bench.shapes import SHAPES, shape_config
from paceline.config.engine_schema import VllmSection
from paceline.rollout.protocol import RolloutRequest, SamplingParams
from paceline.rollout.remote.child import ChildCommand, EngineChild
from paceline.rollout.remote.engine import RemoteEngine, RemoteLimits
from paceline.rollout.remote.weight_files import WeightTransfer
from paceline.rollout.vllm.arguments import ServedModel, engine_arguments, process_environment
from paceline.types import Prompt


class NoText:
    """Texts are not what is measured."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--python", default=None)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens-in", type=int, default=256)
    parser.add_argument("--tokens-out", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transfer", choices=("file", "cuda_ipc"), default="file")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(options, Path(name)), indent=2))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    model_dir, shape = folder / "model", shape_config(options.shape)
    shape.save_pretrained(model_dir)
    on_cpu = options.device == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    settings = VllmSection(
        gpu_memory_utilization=0.6,
        max_num_seqs=min(512, options.prompts * options.samples),
        max_num_batched_tokens=16384,
        enforce_eager=on_cpu,
    )
    served = ServedModel(
        str(model_dir), str(dtype).split(".")[1], options.tokens_in + options.tokens_out, 0, on_cpu
    )
    command = ChildCommand(
        "paceline.rollout.foreign.vllm_worker",
        {"arguments": engine_arguments(settings, served), "sleep_level": 1},
        options.python or "python",
        process_environment(settings),
    )
    limits = RemoteLimits(900.0, 900.0, WeightTransfer(options.transfer))
    began = time.monotonic()
    engine = RemoteEngine(
        "0", lambda notify: EngineChild("0", command, folder / "log", notify), NoText(), limits
    )
    try:
        engine.wait_ready()
        start_s = time.monotonic() - began
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype)
        weights = list(model.to(options.device).named_parameters())
        loads = [timed(lambda version=v: engine.load_weights(weights, version)) for v in range(3)]
        rollouts = [rollout(engine, options) for _ in range(options.repeats)]
        cycles = [timed(lambda: (engine.sleep(), engine.wake())) for _ in range(3)]
    finally:
        engine.close()
    num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in weights)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "facts": engine.facts,
        "device": None if on_cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": options.shape,
        "transfer": options.transfer,
        "workload": {n: getattr(options, n) for n in ("prompts", "samples", "tokens_in", "tokens_out")},
        "start_s": start_s,
        "load_s": loads,
        "load_gb_per_s": [num_bytes / 1e9 / seconds for seconds in loads],
        "sleep_wake_s": cycles,
        "rollouts": rollouts,
    }


def timed(action) -> float:
    """Seconds of an action."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


def rollout(engine: RemoteEngine, options: argparse.Namespace) -> dict[str, float]:
    """One rollout of the workload with new prompts."""
    vocabulary = shape_config(options.shape).vocab_size
    tokens_PT = torch.randint(10, vocabulary, (options.prompts, options.tokens_in)).tolist()
    asked = [
        RolloutRequest(Prompt(str(i), tuple(tokens), ""), tuple(range(options.samples)), options.tokens_out)
        for i, tokens in enumerate(tokens_PT)
    ]
    params = SamplingParams(1.0, frozenset({0}), ignore_stop=True)
    seconds = timed(lambda: engine.generate(asked, params))
    stats = engine.stats
    return {
        "seconds": seconds,
        "tokens_per_s": stats.num_generated_tokens / seconds,
        "cached_tokens": stats.num_cached_tokens,
        "preemptions": stats.num_preemptions,
    }


if __name__ == "__main__":
    main()
