"""Rollout figures on one GPU, all in one process (imports and kernels cost once), one JSON file per figure.

usage: python benchmarks/h200_rollout.py OUT_FOLDER [NAME ...] [--vllm PYTHON]

NAMEs below, default all but the exact ones. `--vllm` runs the same workloads with vLLM afterwards, on the same GPU, in
the environment of that Python. Kernels are checked against their references first; a wrong one ends the script. After a
fault that leaves the device unusable to this process, the figures that are left get a process of their own.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
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
    parser.add_argument(
        "--failed", type=int, default=0, help="figures that failed in a process before this one"
    )
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    print(f"imports {seconds_of_this_process():.1f} s after the process began", flush=True)
    began = time.perf_counter()
    if wrong := check_kernels():
        print(f"{wrong} kernels are wrong; nothing is measured", flush=True)
        return 1
    print(f"kernels compiled and checked in {time.perf_counter() - began:.1f} s", flush=True)
    names = asked.names or [name for name in (*ROLLOUTS, *STEPS) if not name.endswith("exact")]
    failed = asked.failed
    for done, name in enumerate(names, start=1):
        if run(name, asked.folder):
            continue
        failed += 1
        if (left := names[done:]) and not is_usable():
            print("the device is unusable to this process; another one takes its place", flush=True)
            vllm = ["--vllm", asked.vllm] if asked.vllm else []
            again = [sys.executable, __file__, str(asked.folder), *left, *vllm, "--failed", str(failed)]
            os.execv(sys.executable, again)  # in its place: only its end gives the device's memory back
    if asked.vllm:
        for shape in sorted({name.split("-")[0] for name in names}):
            out = asked.folder / f"vllm-{shape}.json"
            command = [asked.vllm, str(PEER), shape, str(out), str(LENGTHS)]
            failed += subprocess.run(command).returncode != 0
    return 1 if failed else 0


def check_kernels() -> int:
    """How many kernels disagree with their references."""
    device, wrong = torch.device("cuda"), 0
    for dtype, limit in check_paged_kernels.LIMITS.items():
        for check in check_paged_kernels.MEASURED:
            try:
                for name, value in check(device, dtype):
                    wrong += value > limit
                    print(f"check {dtype} {name}: {value:.1e}", flush=True)
            except Exception:  # one that does not compile must not hide what the others find
                traceback.print_exc()
                wrong += 1
    return wrong


def seconds_of_this_process() -> float:
    """Since the process began, its interpreter's start included."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def is_usable() -> bool:
    """Whether this process can still use the device; some faults end that."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


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
    except Exception:  # one that fails, whichever compiler or library says so, must not cost the others
        traceback.print_exc()
        return False
    finally:
        gc.collect()
        if is_usable():
            torch.cuda.empty_cache()
    result["command"] = f"python benchmarks/h200_rollout.py OUT {name}"
    (folder / f"rollout-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{name}\n{text}\n", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
