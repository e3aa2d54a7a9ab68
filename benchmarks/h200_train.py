"""Trainer figures on one GPU, many workloads in one process (kernels compile once), one JSON file per workload.

usage: python benchmarks/h200_train.py OUT_FOLDER [NAME ...]      (names below; default: all)
"""

import gc
import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from paceline.bench.train import TrainWorkload, bench_train

WORKLOADS = {
    "1.7b-16k": TrainWorkload("qwen3-1.7b", 16_384),
    "1.7b-16k-selective": TrainWorkload(
        "qwen3-1.7b", 16_384, recompute="selective", selective_keep="attention"
    ),
    "1.7b-16k-all": TrainWorkload("qwen3-1.7b", 16_384, recompute="all"),
    "1.7b-16k-plain": TrainWorkload("qwen3-1.7b", 16_384, preset="plain", num_repeats=2),
    "1.7b-32k": TrainWorkload("qwen3-1.7b", 32_768, recompute="selective", num_repeats=3),
    "0.6b-16k": TrainWorkload("qwen3-0.6b", 16_384),
    "4b-16k": TrainWorkload("qwen3-4b", 16_384, recompute="selective", num_repeats=3),
    "8b-16k": TrainWorkload("qwen3-8b", 16_384, recompute="selective", with_optimizer=False, num_repeats=2),
    "llama3-8b-16k": TrainWorkload(
        "llama3-8b", 16_384, recompute="selective", with_optimizer=False, num_repeats=2
    ),
    "1.7b-shared": TrainWorkload("qwen3-1.7b", 16_384, group=(512, 8, 256)),
    "1.7b-unshared": TrainWorkload("qwen3-1.7b", 16_384, group=(512, 8, 256), share_prefixes=False),
    "0.6b-shared": TrainWorkload("qwen3-0.6b", 16_384, group=(512, 8, 256)),
    "0.6b-unshared": TrainWorkload("qwen3-0.6b", 16_384, group=(512, 8, 256), share_prefixes=False),
}


def main(folder: Path, names: list[str]) -> int:
    """Runs the named workloads; a failure is printed and the rest goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names or list(WORKLOADS):
        try:
            result = bench_train(WORKLOADS[name])
        except (RuntimeError, ValueError, AssertionError):  # one that does not fit must not cost the others
            traceback.print_exc()
            failed += 1
            continue
        finally:
            gc.collect()  # a model, its layers' forwards and the optimiser's hooks hold one another
            torch.cuda.empty_cache()
        result["command"] = f"python benchmarks/h200_train.py OUT {name}"
        result["arguments"] = asdict(WORKLOADS[name])
        (folder / f"train-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        parts = [
            f"{key} {row['median_s'] * 1e3:.1f} ms {row['tokens_per_s']:,.0f} tok/s MFU {row['mfu']:.3f} "
            f"peak {row['peak_gib']:.1f}"
            for key in ("forward_backward", "update_actor", "score")
            if (row := result.get(key))
        ]
        print(name, "|", " | ".join(parts), f"| first use {result['compile_s']:.0f} s", flush=True)
        print("   ", {k: round(v, 1) for k, v in result["kernel_ms"].items() if k != "others"}, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
