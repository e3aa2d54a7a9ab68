"""Do all meshes of the ranks at hand give one rank's loss and gradient norm, and what does each cost?

    torchrun --nproc-per-node 4 benchmarks/many_ranks.py --model qwen3-0.6b --json meshes.json

On every device: CUDA with NCCL, NPU with HCCL, CPU with gloo (`--model tiny`). Random weights; groups of samples with
a shared prompt. One JSON object per mesh: loss and gradient norm of three updates, seconds and samples' tokens per
second of the last, peak memory of the first rank, and how far the first loss and norm are from one rank's.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from paceline.bench.shapes import shape_config
from paceline.config import Config, load_config
from paceline.config.parallelism import MeshSizes
from paceline.engine.mesh import RankMesh
from paceline.engine.samples import TrainSample
from paceline.engine.trainer import TrainEngine
from paceline.launch.devices import backends, device_name, resolve_kind, take_device
from paceline.model.families import check_family
from paceline.model.loading import CausalModel, wrap_model
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

NUM_UPDATES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, or a shape of `paceline bench`")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "npu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kind = resolve_kind(options.device)
    dist.init_process_group(backends(kind))
    device = take_device(kind, dist.get_node_local_rank())
    torch.manual_seed(0)
    found = []
    for sizes in (MeshSizes(), *meshes(dist.get_world_size())):
        result = measure(sizes, options, device)
        if found:
            for name in ("loss", "grad_norm"):
                result[f"{name}_difference"] = abs(result[name][0] - found[0][name][0]) / abs(
                    found[0][name][0]
                )
        found.append(result)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    if options.json is not None and dist.get_rank() == 0:
        header = {"torch": torch.__version__, "device": device_name(device), "ranks": dist.get_world_size()}
        arguments = {name: value for name, value in vars(options).items() if name != "json"}
        record = {**header, "options": arguments, "meshes": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def meshes(num_ranks: int) -> list[MeshSizes]:
    """All meshes of that many ranks with at most four sequence-parallel and two tensor-parallel ranks."""
    return [
        MeshSizes(replicate, num_ranks // (replicate * sp * tp), sp, tp)
        for tp in (1, 2)
        for sp in (1, 2, 4)
        for replicate in (1, 2)
        if num_ranks % (replicate * sp * tp) == 0
    ]


def measure(sizes: MeshSizes, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Three updates on one mesh; without axes, on every rank by itself."""
    mesh = RankMesh.single()
    if sizes.num_ranks > 1:
        mesh = RankMesh.from_process_group(sizes, device.type)
    config, model = settings(options), build(options, device)
    batches = [draw(options, model.shape.vocab_size, seed) for seed in range(NUM_UPDATES)]
    engine = TrainEngine(model, config, Ledger(), NUM_UPDATES, mesh)
    memory = None if device.type == "cpu" else torch.get_device_module(device)
    if memory is not None:
        memory.empty_cache()
        memory.reset_peak_memory_stats()
    losses, norms, seconds = [], [], 0.0
    for batch in batches:
        dist.barrier()
        start = time.perf_counter()
        metrics = MetricAccumulator()
        outcome = engine.update(batch, metrics)
        if memory is not None:
            memory.synchronize()
        seconds = time.perf_counter() - start
        assert outcome is not None
        together = MetricAccumulator()
        for part in mesh.gather_objects(metrics):
            together.merge(part)
        losses.append(together.reduce()["loss/total"])
        norms.append(outcome.grad_norm)
    return {
        "mesh": sizes.describe() if sizes.num_ranks > 1 else "one rank",
        "loss": losses,
        "grad_norm": norms,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(sum(sample.num_tokens for sample in batches[-1]) / seconds),
        "peak_gib": None if memory is None else round(memory.max_memory_allocated() / 2**30, 2),
    }


def settings(options: argparse.Namespace) -> Config:
    return load_config(
        None,
        sections={
            "model": {"path": "random"},
            "task": {"path": "none.jsonl"},
            "batch": {"token_budget": options.token_budget, "overlong": "own_micro_batch"},
            "rollout": {"max_new_tokens": options.response_tokens},
            "train": {"lr": 1e-5},
        },
    )


def build(options: argparse.Namespace, device: torch.device) -> CausalModel:
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    torch.manual_seed(0)
    config = shape(options.model)
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # every rank must start from the same weights
    for parameter in module.parameters():
        dist.broadcast(parameter.data, src=0)
    return wrap_model(module, device, check_family(config, type(module)))


def shape(name: str) -> PretrainedConfig:
    if name != "tiny":
        return shape_config(name)
    return LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )


def draw(options: argparse.Namespace, vocabulary: int, seed: int) -> list[TrainSample]:
    """Groups with a shared prompt, responses between an eighth and the whole of the limit."""
    generator = np.random.default_rng(seed)
    found = []
    for prompt in range(options.prompts):
        prompt_ids = tuple(generator.integers(3, vocabulary, options.prompt_tokens).tolist())
        for _ in range(options.samples):
            limit = options.response_tokens
            length = int(generator.integers(max(1, limit // 8), limit + 1))
            found.append(
                TrainSample(
                    f"p{prompt}",
                    prompt_ids,
                    tuple(generator.integers(3, vocabulary, length).tolist()),
                    np.ones(length, dtype=np.float32),
                    np.full(length, generator.normal(), dtype=np.float32),
                    np.full(length, -np.log(vocabulary), dtype=np.float32),
                )
            )
    return found


if __name__ == "__main__":
    main()
