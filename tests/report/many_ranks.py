"""Writes the folder of a synthetic run of many ranks and steps: the ledger's own format, written as text, because a
million spans through the real ledger would take minutes."""

import json
import random
from pathlib import Path

from report_runs import RunWriter

from paceline.telemetry.metrics import MetricLog

STAGES = (
    # stage, mean seconds, tokens, FLOPs
    ("data", 0.02, 0, 0.0),
    ("rollout", 6.0, 60_000, 9e14),
    ("reward", 0.4, 0, 0.0),
    ("old_logprob", 0.9, 80_000, 4e14),
    ("ref_logprob", 0.9, 80_000, 4e14),
    ("advantage", 0.01, 0, 0.0),
    ("update_actor", 4.2, 80_000, 1.3e15),
    ("sync", 0.15, 0, 0.0),
)
MICRO_BATCHES = 4
SLOW_RANK = 13
_KINDS = 3
"""Ranks with noise of their own; the others repeat them, which is quicker to write."""


def write_many_ranks(run_dir: Path, num_ranks: int, num_steps: int) -> Path:
    """A completed run in which rank 13 updates a fifth slower, so that the others wait for it in every step."""
    writer = RunWriter(run_dir, num_steps=num_steps, device_name="NVIDIA H200")
    writer.write_config()
    writer.write_environment()
    writer.write_summary("completed")
    (run_dir / "ledger").mkdir()
    kinds = {kind: "".join(_lines(kind, num_steps)) for kind in {SLOW_RANK, *range(min(_KINDS, num_ranks))}}
    for rank in range(num_ranks):
        kind = rank if rank == SLOW_RANK else rank % _KINDS
        text = kinds[kind].replace(f'"rank": {kind}}}', f'"rank": {rank}}}', 1)
        (run_dir / "ledger" / f"rank{rank}.jsonl").write_text(text, encoding="utf-8")
    _write_metrics(run_dir, num_steps)
    return run_dir


def _lines(rank: int, num_steps: int):
    noise = random.Random(rank)
    shared = random.Random(0)
    yield f'{{"v": 1, "kind": "run", "unix_s": 1795963813.25, "rank": {rank}}}\n'
    now = 0.0
    for step in range(1, num_steps + 1):
        lasts = 14.0 * shared.uniform(0.95, 1.25)  # of every rank: they meet at the step's end
        yield from _step(rank, step, now, lasts, noise)
        now += lasts
    yield ""


def _step(rank: int, step: int, start: float, lasts: float, noise: random.Random):
    now = start
    stages = []
    for stage, mean, tokens, flops in STAGES:
        seconds = (
            mean * noise.uniform(0.9, 1.02) * (1.2 if stage == "update_actor" and rank == SLOW_RANK else 1)
        )
        inner = MICRO_BATCHES if stage == "update_actor" else 0
        for index in range(inner):
            yield _span(
                step, stage, "micro-batch", 1, now + index * seconds / inner, seconds / inner, tokens // inner
            )
        yield _span(step, stage, "", 0, now, seconds, 0 if inner else tokens)
        stages.append(_totals(stage, seconds, 1 + inner, tokens, flops))
        now += seconds
    idle = start + lasts - now - 0.004
    yield _span(step, "idle", "", 0, now, idle, 0)
    stages.append(_totals("idle", idle, 1, 0, 0.0))
    yield (
        f'{{"v": 1, "kind": "section", "step": {step}, "start_s": {start}, "end_s": {start + lasts}, '
        f'"wall_s": {lasts}, '
        f'"unaccounted_s": 0.004, "num_spans": 13, "num_spans_not_kept": 0, "stages": {{{", ".join(stages)}}}, '
        '"peak_allocated": 81000000000, "peak_reserved": 90000000000, "host_rss": 41000000000}\n'
    )


def _span(step: int, stage: str, name: str, depth: int, start: float, seconds: float, tokens: int) -> str:
    more = f', "tokens": {tokens}' if tokens else ""
    return (
        f'{{"v": 1, "kind": "span", "step": {step}, "stage": "{stage}", "name": "{name}", "depth": {depth}, '
        f'"start_s": {start}, "end_s": {start + seconds}, "self_s": {seconds}{more}}}\n'
    )


def _totals(stage: str, seconds: float, count: int, tokens: int, flops: float) -> str:
    return (
        f'"{stage}": {{"self_s": {seconds}, "count": {count}, "tokens": {tokens}, "flops": {flops}, "bytes": 0, '
        '"peak_allocated": 71000000000, "peak_reserved": 90000000000, "host_rss": 41000000000}'
    )


def _write_metrics(run_dir: Path, num_steps: int) -> None:
    noise = random.Random(1)
    log = MetricLog(run_dir)
    for step in range(1, num_steps + 1):
        values = {
            "reward/mean": 0.2 + 0.5 * step / num_steps + noise.gauss(0, 0.03),
            "entropy": 0.9 - 0.3 * step / num_steps + noise.gauss(0, 0.02),
            "grad_norm": 1.0 + noise.gauss(0, 0.1),
            "response_length/mean": 800 + noise.gauss(0, 20),
            "throughput/tokens_per_s": 300_000 + noise.gauss(0, 9000),
            "time/step": 14.0,
        }
        log.record(step, values)
    log.close()
    (run_dir / "samples").mkdir()
    (run_dir / "samples" / "step1.jsonl").write_text(json.dumps({"v": 1, "step": 1}) + "\n", encoding="utf-8")
