"""A tiny model folder, a tiny task and the sections of a run that trains on them in a second or two."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{index}" for index in range(94)]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def write_tiny_model(folder: Path, family: str = "llama", **model: Any) -> Path:
    """A Hugging Face folder with random weights and a word-level tokenizer of 97 words."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_model(family, **model).module.save_pretrained(folder)
    return folder


def write_other_weights(root: Path) -> Path:
    """The folder `other`: the tiny model of `root / "model"` with every weight a little larger."""
    folder = root / "other"
    shutil.copytree(root / "model", folder)
    weights = load_file(folder / "model.safetensors")
    larger = {name: 1.01 * weight for name, weight in weights.items()}
    save_file(larger, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_prompts(path: Path, count: int = 24) -> Path:
    """Prompts whose reward is the share of even words: a signal that random samples have."""
    rows = [
        {"prompt": f"w{index % 90} w{index // 3} w7", "answer": f"w{index % 5}"} for index in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROLLOUT_CLOCKS = ("rollout/finish_", "rollout/tail_", "device/", "profiler/")
"""Beginnings of the names of metrics that tell a rollout's or an instrument's time."""


def tiny_sections(tmp_path: Path, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Config sections of a small run below `tmp_path`; `changes` are merged section by section."""
    if not (tmp_path / "model").exists():
        write_tiny_model(tmp_path / "model")
        write_prompts(tmp_path / "prompts.jsonl")
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "r", "dir": str(tmp_path / "runs"), "num_steps": 3},
        "model": {"path": str(tmp_path / "model")},
        "task": {
            "path": str(tmp_path / "prompts.jsonl"),
            "reward": "tiny_rewards:even_share",
            "eval_size": 6,
            "reward_workers": 1,
        },
        "batch": {"num_prompts": 4, "num_samples": 4, "token_budget": 256},
        "rollout": {"max_new_tokens": 6},
        "train": {"lr": 1e-3},
        "telemetry": {"live": "off"},
    }
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    return sections
