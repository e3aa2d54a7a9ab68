"""vLLM on the workloads of `paceline bench rollout`: random weights, forced lengths, the sampled log-prob returned.

usage: python benchmarks/peers/vllm_rollout.py SHAPE OUT.json [LENGTHS.json]

SHAPE is 0.6b, 1.7b, 4b or 8b (Qwen3). Runs in an environment that has vLLM 0.24.0, which paceline does not need.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
)
import numpy as np
from transformers import Qwen3Config
from vllm import LLM, SamplingParams, __version__

SHAPES = {  # hidden, layers, heads, intermediate, tied
    "0.6b": (1024, 28, 16, 3072, True),
    "1.7b": (2048, 28, 16, 6144, True),
    "4b": (2560, 36, 32, 9728, True),
    "8b": (4096, 36, 32, 12288, False),
}


def start(shape: str) -> LLM:
    """The engine on random weights, with everything it offers for speed."""
    hidden, layers, heads, intermediate, tied = SHAPES[shape]
    folder = tempfile.mkdtemp(prefix=f"qwen3-{shape}-")
    Qwen3Config(
        vocab_size=151_936,
        head_dim=128,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        max_position_embeddings=40_960,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.8,
        max_model_len=2048,
        max_num_seqs=512,
        max_num_batched_tokens=16_384,
        enable_prefix_caching=True,
    )


def run(llm: LLM, name: str, prompts: list[list[int]], lengths: list[int]) -> list[dict[str, object]]:
    """Two repeats of one workload."""
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False, logprobs=0
        )
        for n in lengths
    ]
    rows = []
    for repeat in range(2):
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        rows.append(
            {"workload": name, "repeat": repeat, "seconds": seconds, "tokens_per_s": tokens / seconds}
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(shape: str, out: Path, lengths: Path | None) -> int:
    """Runs uniform, group and (with a file of lengths) tail."""
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    llm = start(shape)
    startup_s = time.perf_counter() - began
    uniform = rng.integers(1000, 100_000, (256, 128)).tolist()
    groups = [prompt for prompt in rng.integers(1000, 100_000, (64, 256)).tolist() for _ in range(8)]
    rows = run(llm, "uniform 256x(128+512)", uniform, [512] * 256)
    rows += run(llm, "group", groups, [512] * 512)
    if lengths is not None:
        rows += run(llm, "tail", groups, json.loads(lengths.read_text()))
    result = {"engine": f"vllm {__version__}", "model": shape, "startup_s": startup_s, "rows": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None))
