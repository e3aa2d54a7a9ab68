"""A supervised run with adapters on two ranks through the command line: numbers, export and resume of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import WORDS, write_tiny_model

from paceline.config import dump_config, load_sft_config
from paceline.schedules import run_sft
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import read_ledger

TESTS = Path(__file__).parents[1]
COMPARED = (
    "loss/total",
    "grad_norm",
    "entropy",
    "lr",
    "eval/loss",
    "eval/perplexity",
    "eval/tokens",
    "tokens/loss",
    "tokens/prompt",
    "rows/learned",
    "epoch",
    "updates/applied",
    "prompts/consumed",
)


def recipe(tmp_path: Path, name: str, **changes) -> Path:
    if not (tmp_path / "model").exists():
        write_tiny_model(tmp_path / "model")
        rows = [{"prompt": WORDS[i], "completion": f"{WORDS[i + 1]} {WORDS[i // 2]}"} for i in range(21)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "run": {"name": name, "dir": str(tmp_path / "runs"), "eval_every": 2},
        "model": {"path": str(tmp_path / "model")},
        "lora": {"rank": 4},
        "task": {"path": str(tmp_path / "rows.jsonl"), "eval_size": 5},
        "batch": {"num_prompts": 5, "token_budget": 64},
        # eps of the gradients' size: Adam's first step is else the sign of the gradient
        "train": {"lr": 1e-3, "eps": 1e-3},
        "checkpoint": {"export_hf": True, "every": 2, "keep": 9},
        "telemetry": {"live": "off"},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    path = tmp_path / f"{name}.yaml"
    path.write_text(dump_config(load_sft_config(None, sections=sections)))
    return path


def run_on_two(path: Path, *overrides: str) -> None:
    places = ("cluster.num_devices=2", "cluster.device=cpu")
    search = [str(TESTS / "model"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "sft", str(path), *places, *overrides],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search)), "OMP_NUM_THREADS": "1"},
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run: ") == 1


def compared(run_dir: Path) -> dict[int, dict[str, float]]:
    return {
        record.step: {name: record.metrics[name] for name in COMPARED if name in record.metrics}
        for record in read_metrics(run_dir)
    }


def test_adapters_learned_on_one_rank_go_on_on_two_and_are_exported_as_by_one(tmp_path):
    whole = run_sft(load_sft_config(recipe(tmp_path, "whole"))).run_dir
    run_sft(load_sft_config(recipe(tmp_path, "cut", sft={"max_steps": 2})))
    run_on_two(recipe(tmp_path, "cut"))
    cut = tmp_path / "runs" / "cut"
    found, expected = compared(cut), compared(whole)
    assert list(found) == list(expected) == [0, 1, 2, 3, 4]  # 16 rows, 5 an update: the last has one
    for step, metrics in expected.items():
        assert set(found[step]) == set(metrics)
        for name, value in metrics.items():
            assert found[step][name] == pytest.approx(value, rel=2e-5, abs=1e-6), (step, name)
    for file in ("export/model.safetensors", "adapter/adapter_model.safetensors"):
        mine, wanted = load_file(cut / file), load_file(whole / file)
        assert mine.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert [ledger.rank for ledger in read_ledger(cut)] == [0, 1]
