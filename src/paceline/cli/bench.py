"""`paceline bench WHAT`: this machine's figures on fixed workloads."""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.config import ConfigError

bench_app = typer.Typer(help="Measure this machine on a fixed workload.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


@bench_app.command("step")
def step(
    model: Annotated[
        str,
        typer.Option(
            help="Model folder or id (default: the demo's weights), or a shape: qwen3-0.6b, tiny..."
        ),
    ] = "",
    workload: Annotated[
        str, typer.Option(help="With a shape: group (64 x 8 samples, 256 in, 512 out).")
    ] = "group",
    shrink: Annotated[int, typer.Option(min=1, help="With a shape: divide counts and lengths.")] = 1,
    exact: Annotated[bool, typer.Option(help="With a shape: rollout.exact.")] = False,
    num_prompts: Annotated[int, typer.Option(min=1)] = 4,
    num_samples: Annotated[int, typer.Option(min=2)] = 4,
    new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    num_steps: Annotated[int, typer.Option(min=1, help="The first one warms up.")] = 6,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    num_examples: Annotated[int, typer.Option(min=0, help="Worked examples in every prompt.")] = 4,
    peer: Annotated[str | None, typer.Option(help="trl: the same workload in its own environment.")] = None,
    as_json: AsJson = False,
) -> None:
    """Whole GRPO steps: rollout, reward, update."""
    _one_of("--dtype", dtype, ("bfloat16", "float32"))
    if peer not in (None, "trl"):
        raise ConfigError("--peer", peer, "there is one peer so far", "trl")
    from paceline.bench.grpo_step import GrpoStepBench, bench_grpo_step, grpo_step_text
    from paceline.bench.shapes import SHAPES
    from paceline.bench.step import bench_step
    from paceline.demo.weights import ensure_smollm2

    if model in SHAPES:
        _one_of("--workload", workload, ("group",))
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            result = bench_grpo_step(
                GrpoStepBench(model, num_steps=num_steps, shrink=shrink, exact=exact), Path(folder)
            )
        print(json.dumps(result, indent=2) if as_json else grpo_step_text(result))
        return
    path = model or str(ensure_smollm2())
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        result = bench_step(
            path, num_prompts, num_samples, new_tokens, num_steps, dtype, num_examples, peer, Path(folder)
        )
    print(json.dumps(result, indent=2) if as_json else _step_text(result))


@bench_app.command("train")
def train(
    model: Annotated[str, typer.Option(help="Shape: qwen3-0.6b, -1.7b, -4b, -8b, llama3-8b.")] = "qwen3-1.7b",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the packed micro-batch.")] = 16_384,
    recompute: Annotated[str, typer.Option(help="none, selective or all.")] = "none",
    keep: Annotated[str, typer.Option(help="selective: matmuls, half_matmuls or attention.")] = "matmuls",
    preset: Annotated[str, typer.Option(help="train.preset: fast or plain.")] = "fast",
    chunk: Annotated[int, typer.Option(min=1, help="train.logprob_chunk.")] = 2048,
    group: Annotated[
        str | None, typer.Option(help="PROMPT,SAMPLES,RESPONSE tokens: groups that share their prompts.")
    ] = None,
    share: Annotated[bool, typer.Option(help="Compute a group's prompt once.")] = True,
    optimizer: Annotated[bool, typer.Option(help="Time the whole update, optimiser included.")] = True,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """The trainer's passes on a published shape with random weights."""
    from paceline.bench.shapes import SHAPES
    from paceline.bench.train import TrainWorkload, bench_train

    _one_of("--model", model, SHAPES)
    workload = TrainWorkload(
        model=model,
        num_tokens=tokens,
        recompute=_one_of("--recompute", recompute, ("none", "selective", "all")),
        selective_keep=_one_of("--keep", keep, ("matmuls", "half_matmuls", "attention")),
        preset=_one_of("--preset", preset, ("fast", "plain")),
        logprob_chunk=chunk,
        group=None if group is None else _group(group),
        share_prefixes=share,
        with_optimizer=optimizer,
        num_repeats=repeats,
    )
    result = bench_train(workload)
    print(json.dumps(result, indent=2) if as_json else _train_text(result))


@bench_app.command("rollout")
def rollout(
    model: Annotated[
        str, typer.Option(help="Shape: qwen3-0.6b, -1.7b, -4b, -8b, llama3-8b, tiny.")
    ] = "qwen3-0.6b",
    workload: Annotated[str, typer.Option(help="group, tail or uniform.")] = "group",
    cache: Annotated[str, typer.Option(help="rollout.cache: auto, slots or paged.")] = "auto",
    exact: Annotated[bool, typer.Option(help="rollout.exact: what it costs.")] = False,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    shrink: Annotated[int, typer.Option(min=1, help="Divide counts and lengths: does it run here?")] = 1,
    as_json: AsJson = False,
) -> None:
    """The native engine against the memory's bandwidth, on random weights with forced lengths."""
    from paceline.bench.rollout import RolloutBench, bench_rollout, rollout_text
    from paceline.bench.shapes import SHAPES

    result = bench_rollout(
        RolloutBench(
            model=_one_of("--model", model, SHAPES),
            workload=_one_of("--workload", workload, ("group", "tail", "uniform")),
            cache=_one_of("--cache", cache, ("auto", "slots", "paged")),
            exact=exact,
            num_repeats=repeats,
            shrink=shrink,
        )
    )
    print(json.dumps(result, indent=2) if as_json else rollout_text(result))


@bench_app.command("padded")
def padded(
    model: Annotated[str, typer.Option(help="Shape: qwen3-0.6b, ..., or tiny for a CPU.")] = "qwen3-0.6b",
    micro_batches: Annotated[int, typer.Option(min=2)] = 32,
    rows: Annotated[int, typer.Option(min=1, help="Rows of every micro-batch.")] = 2,
    shortest: Annotated[int, typer.Option(min=2, help="Tokens of the shortest sample.")] = 768,
    longest: Annotated[int, typer.Option(min=2, help="Tokens of the longest sample.")] = 1536,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    as_json: AsJson = False,
) -> None:
    """Padding to micro-batch, bucket and mini-batch widths, where kernels plan for every new shape."""
    from paceline.bench.padded import PaddedWorkload, bench_padded
    from paceline.bench.shapes import SHAPES

    _one_of("--model", model, SHAPES)
    result = bench_padded(PaddedWorkload(model, micro_batches, rows, shortest, longest, repeats))
    print(json.dumps(result, indent=2) if as_json else _padded_text(result))


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ConfigError(option, value, f"must be one of {', '.join(allowed)}", allowed[0])
    return value


def _group(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) for part in parts):
        raise ConfigError("--group", text, "must be three positive numbers, such as", "512,8,256")
    prompt, samples, response = map(int, parts)
    return prompt, samples, response


def _step_text(result: dict[str, Any]) -> str:
    ours = result["paceline"]
    lines = [f"paceline  {ours['median_s']:8.2f} s per step"]
    lines += [f"  {stage:<14} {seconds:8.3f} s" for stage, seconds in ours["stages"].items()]
    if peer := result.get("trl"):
        lines.append(f"trl {peer['version']}  {peer['median_s']:8.2f} s per step")
        lines += [f"  {part:<14} {seconds:8.3f} s" for part, seconds in peer["parts_s"].items()]
        lines.append(f"ratio     {result['ratio']:8.2f}")
    return "\n".join(lines)


def _train_text(result: dict[str, Any]) -> str:
    lines = [f"{result['workload']}, {result['num_tokens']} tokens, {result['device']}, {result['dtype']}"]
    for name in ("forward_backward", "update_actor", "score"):
        if name not in result:
            continue
        row = result[name]
        share = "" if row["mfu"] is None else f"  MFU {row['mfu']:.3f}"
        peak = f"  peak {row['peak_gib']:.1f} GiB" if "peak_gib" in row else ""
        lines.append(
            f"  {name:<17}{row['median_s'] * 1e3:9.1f} ms {row['tokens_per_s']:10,.0f} tok/s "
            f"{row['tflops']:7.1f} TFLOP/s{share}{peak}"
        )
    lines.append(f"  first use        {result['compile_s']:9.1f} s")
    return "\n".join(lines)


def _padded_text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['workload']['model']}, {result['num_tokens']} tokens, {result['device']}, {result['dtype']}"
    ]
    rows = {**result["choices"], **{k: v for k, v in result.items() if k.endswith("_for_comparison")}}
    for choice, row in rows.items():
        lines.append(
            f"  {choice}: {row['num_micro_batches']} micro-batches, {row['distinct_shapes']} shapes, "
            f"{row['num_slots']:,} slots"
        )
        for name in ("old_logprob", "update_actor"):
            times = row[name]
            lines.append(
                f"    {name:<13} first {times['first_s']:7.2f} s  again {times['repeat_s']:7.2f} s  "
                f"{times['first_use_ms_per_new_shape']:7.1f} ms per new shape"
            )
    plans, bad = result["attention"], result["one_long_sample"]
    lines.append(
        f"  attention, a new shape {plans['first_ms']:.1f} ms, the same again {plans['repeat_ms']:.1f} ms"
    )
    lines.append(
        f"  one long sample: mini-batch width computes {bad['slots_ratio']:.2f} x the slots, "
        f"update_actor takes {bad['update_actor_repeat_ratio']:.2f} x the time"
    )
    return "\n".join(lines)
