"""The log-prob head alone on one GPU: its time over that of its matrix products, and the memory it takes.

usage: python benchmarks/head.py [TOKENS VOCABULARY HIDDEN]      (default 16384 151936 2048; prints one JSON object)

`scored`: log-prob and entropy, forward only (one product a chunk). `one_pass`: forward and the gradients of hidden
states and weight (three products a chunk), as an update does them.
"""

import datetime
import json
import sys
from collections.abc import Callable

import torch

from paceline.model.fused.head import head_loss
from paceline.model.logit_kernels import logit_kernels_for
from paceline.model.logprob_head import HeadSettings, add_product, response_logprobs
from paceline.telemetry.environment import package_versions

CHUNK = 2048


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Mean of `repeats` calls in a row after two that warm up."""
    work()
    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def main(num_tokens: int, vocabulary: int, hidden_size: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, device="cuda") * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (num_tokens,), device="cuda")
    advantage = torch.randn(num_tokens, device="cuda")
    settings, kernels = HeadSettings(1.0, None, CHUNK), logit_kernels_for("cuda")
    chunks = [slice(start, start + CHUNK) for start in range(0, num_tokens, CHUNK)]

    def one_pass() -> None:
        loss = head_loss(
            hidden,
            weight,
            targets,
            settings,
            chunks,
            lambda rows, logp, _: (logp * advantage[rows]).sum(),
            kernels,
        )
        loss.backward()
        hidden.grad = weight.grad = None

    @torch.no_grad()
    def scored() -> None:
        response_logprobs(hidden, weight, None, targets, settings)

    logits = torch.randn(CHUNK, vocabulary, device="cuda").bfloat16()
    total = torch.zeros(vocabulary, hidden_size, device="cuda")

    @torch.no_grad()
    def products(count: int) -> None:
        for rows in chunks:
            torch.mm(hidden[rows], weight.T, out=logits)
            if count == 3:
                torch.mm(logits, weight)
                add_product(total, logits.T, hidden[rows])

    figures = {}
    for name, work, count in (("scored", scored, 1), ("one_pass", one_pass, 3)):
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        spent = milliseconds(work)
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        matmul = milliseconds(lambda count=count: products(count))
        figures[name] = {"ms": spent, "matmul_ms": matmul, "ratio": spent / matmul, "extra_gib": peak}
    print(
        json.dumps(
            {
                "tokens": num_tokens, "vocabulary": vocabulary, "hidden": hidden_size, "chunk": CHUNK, **figures,
                "device": torch.cuda.get_device_name(), "dtype": "bfloat16", "versions": package_versions(),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "command": "python benchmarks/head.py",
            },
            indent=1,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(*(map(int, sys.argv[1:4]) if len(sys.argv) > 3 else (16_384, 151_936, 2048)))
