"""One GRPO step of TRL's GRPOTrainer on the workload file that `paceline bench step` wrote; prints one JSON line.

Runs in TRL's own virtual environment (`make bench-peers`). The workload fixes the weights, the prompts' token ids,
samples per prompt, response length (forced: end tokens are suppressed), dtype and the number of steps.

usage: python trl_step.py WORKLOAD.json
"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", WANDB_DISABLED="true", TOKENIZERS_PARALLELISM="false"
)

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

workload = json.loads(Path(sys.argv[1]).read_text())
num_samples, new_tokens = workload["num_samples"], workload["new_tokens"]
num_prompts = len(workload["prompts"])
if workload["num_threads"]:
    torch.set_num_threads(workload["num_threads"])
bf16 = workload["dtype"] == "bfloat16"

tokenizer = AutoTokenizer.from_pretrained(workload["model"])
# TRL's usual mixed precision: float32 weights under bfloat16 autocast; pure bfloat16 weights would lose small updates
model = AutoModelForCausalLM.from_pretrained(workload["model"], dtype=torch.float32)
rows = [{"prompt": prompt["text"]} for prompt in workload["prompts"] for _ in range(workload["num_steps"])]


def reward(completions: list[str], **_: object) -> list[float]:
    """Varied but cheap: lengths differ, so that no group is without a signal."""
    return [float(len(completion) % 7) for completion in completions]


class Clock(TrainerCallback):
    """Wall seconds of every optimiser step, generation included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.perf_counter() - self._began)


spent: dict[str, float] = {}


def timed(owner: object, name: str, label: str) -> None:
    """Adds the seconds of a method's calls to `spent[label]`; fails loudly where the pinned version differs."""
    method = getattr(owner, name)

    def measured(*args: object, **kwargs: object) -> object:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[label] = spent.get(label, 0.0) + time.perf_counter() - began

    setattr(owner, name, measured)


clock = Clock()
micro_batch = workload["trl_micro_batch"]
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=GRPOConfig(
        output_dir=workload["output_dir"],
        use_cpu=True,
        bf16=bf16,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_prompts * num_samples // micro_batch,
        num_generations=num_samples,
        max_completion_length=new_tokens,
        max_steps=workload["num_steps"],
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        shuffle_dataset=False,
        disable_tqdm=True,
        logging_strategy="no",
        generation_kwargs={"min_new_tokens": new_tokens},
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[clock],
)
timed(trainer, "_generate", "generation")
timed(trainer, "_compute_loss", "forward")
timed(trainer.accelerator, "backward", "backward")
trainer.train()
print(
    json.dumps(
        {
            "peer": "trl",
            "version": version("trl"),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "step_s": clock.seconds,
            "parts_s": {name: seconds / workload["num_steps"] for name, seconds in spent.items()},
        }
    )
)
