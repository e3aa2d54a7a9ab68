"""Rollout figures on one GPU, all in one process (imports and kernels cost once), one JSON file per figure.

usage: python benchmarks/h200_rollout.py OUT_FOLDER [NAME ...] [--vllm PYTHON]

NAMEs below, default all but the exact ones. `--vllm` runs the same workloads with vLLM afterwards, on the same GPU, in
the environment of that Python. Kernels are checked against their references first; a wrong one ends the script.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

import check_paged_kernels
from paceline.bench.grpo_step import GrpoStepBench, bench_grpo_step, grpo_step_text
from paceline.bench.rollout import RolloutBench, bench_rollout, rollout_text

ROLLOUTS = {
    "0.6b-group": RolloutBench("qwen3-0.6b", "group"),
    "0.6b-tail": RolloutBench("qwen3-0.6b", "tail"),
    "0.6b-uniform": RolloutBench("qwen3-0.6b", "uniform"),
    "1.7b-group": RolloutBench("qwen3-1.7b", "group"),
    "1.7b-tail": RolloutBench("qwen3-1.7b", "tail"),
    "1.7b-uniform": RolloutBench("qwen3-1.7b", "uniform"),
    "4b-group": RolloutBench("qwen3-4b", "group"),
    "4b-tail": RolloutBench("qwen3-4b", "tail"),
    "8b-group": RolloutBench("qwen3-8b", "group"),
    "8b-tail": RolloutBench("qwen3-8b", "tail"),
    "0.6b-uniform-exact": RolloutBench("qwen3-0.6b", "uniform", exact=True, num_repeats=1, shrink=8),
}
STEPS = {
    "0.6b-step": GrpoStepBench("qwen3-0.6b"),
    "1.7b-step": GrpoStepBench("qwen3-1.7b", token_budget=16_384, recompute="selective"),
    "0.6b-step-exact": GrpoStepBench("qwen3-0.6b", shrink=8, exact=True),
}
PEER = Path(__file__).parent / "peers" / "vllm_rollout.py"
LENGTHS = Path(__file__).parents[1] / "src" / "paceline" / "bench" / "tail_lengths.json"


def main() -> int:
    """Runs the named figures; a failure is printed and the rest goes on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--vllm", help="Python of an environment with vLLM")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if wrong := check_kernels():
        print(f"{wrong} kernels are wrong; nothing is measured", flush=True)
        return 1
    names = asked.names or [name for name in (*ROLLOUTS, *STEPS) if not name.endswith("exact")]
    failed = sum(not run(name, asked.folder) for name in names)
    if asked.vllm:
        for shape in sorted({name.split("-")[0] for name in names}):
            out = asked.folder / f"vllm-{shape}.json"
            command = [asked.vllm, str(PEER), shape, str(out), str(LENGTHS)]
            failed += subprocess.run(command).returncode != 0
    return 1 if failed else 0


def check_kernels() -> int:
    """How many kernels disagree with their references."""
    device, wrong = torch.device("cuda"), 0
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for check in (
            check_paged_kernels.check_decode,
            check_paged_kernels.check_rotate,
            check_paged_kernels.check_draw,
        ):
            for name, value in check(device, dtype):
                wrong += value > limit
                print(f"check {dtype} {name}: {value:.1e}", flush=True)
    return wrong


def run(name: str, folder: Path) -> bool:
    """One figure; whether it was measured."""
    try:
        if name in ROLLOUTS:
            result: dict[str, Any] = bench_rollout(ROLLOUTS[name])
            text = rollout_text(result)
        else:
            with tempfile.TemporaryDirectory() as work:
                result = bench_grpo_step(STEPS[name], Path(work))
            text = grpo_step_text(result)
    except (RuntimeError, ValueError, AssertionError):  # one that does not fit must not cost the others
        traceback.print_exc()
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    result["command"] = f"python benchmarks/h200_rollout.py OUT {name}"
    (folder / f"rollout-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{name}\n{text}\n", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
