"""Makes the records in this folder: six GRPO steps of a random two-layer model with TRL, on a CPU.

In the environment of `make bench-peers` (TRL 1.16.0, transformers 5.24, torch 2.13), from the checkout:

    cd SCRATCH && PYTHONPATH=CHECKOUT/tests/data python CHECKOUT/tests/adapters/trl_run/make_run.py > console.log

and out/checkpoint-6/trainer_state.json beside it.
"""

import torch
from datasets import Dataset
from tiny_tokenizer import make_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig
from trl import GRPOConfig, GRPOTrainer

torch.manual_seed(0)
tokenizer = make_tokenizer()
tokenizer.padding_side = "left"
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=1,
)
AutoModelForCausalLM.from_config(config).save_pretrained("tiny")
tokenizer.save_pretrained("tiny")
rows = [{"prompt": f"say hello {number}"} for number in range(64)]


def length_reward(completions: list[str], **_: object) -> list[float]:
    """Varied, so that groups have a signal."""
    return [float(len(completion) % 7) for completion in completions]


GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("tiny"),
    reward_funcs=length_reward,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list(rows),
    eval_dataset=Dataset.from_list(rows[:4]),
    args=GRPOConfig(
        output_dir="out",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        max_steps=6,
        learning_rate=1e-3,
        beta=0.04,
        logging_steps=1,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        report_to=[],
        disable_tqdm=True,
    ),
).train()
