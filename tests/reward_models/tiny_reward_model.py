"""A tiny sequence classifier with a head, in a folder of its own, and conversations for it."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import FAMILIES
from tiny_runs import TEMPLATE, write_tiny_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from paceline.types import RewardJob

RATED_TEMPLATE = "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}</s>"
"""Not the policy's template: a reward model has its own, here one that marks turns and ends with </s>."""


def write_tiny_reward_model(
    folder: Path, family: str = "llama", num_labels: int = 1, **settings: Any
) -> Path:
    """Random weights, head included, beside the word-level tokenizer of `write_tiny_model`."""
    write_tiny_model(folder, family)
    config = type(FAMILIES[family]).from_dict(FAMILIES[family].to_dict() | settings)
    config.num_labels, config.pad_token_id = num_labels, 2
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    tokenizer.chat_template = RATED_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def conversations() -> list[RewardJob]:
    """Two groups of different sizes and one alone; completions of very different lengths, one of them empty."""
    return [
        job("w1 w2 w3", "w4"),
        job("w1 w2 w3", "w4 w5 w6 w7 w8 w9 w10 w11"),
        job("w1 w2 w3", ""),
        job("w20 w21", "w22 w23 w24"),
        job("w20 w21", "w30"),
        job("w40", "w41 w42 w43 w44 w45"),
    ]


def job(question: str, completion: str) -> RewardJob:
    messages = ({"role": "system", "content": "w90"}, {"role": "user", "content": question})
    return RewardJob(f"w90 {question} ", completion, None, {}, messages)
