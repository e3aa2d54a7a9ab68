"""`paceline profile RECIPE`: a few steps, the last one under the profiler, as a table of stages and causes per rank."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.endings import own_placement, speaks_for_the_run
from paceline.config import Config, ConfigError, load_config, load_sft_config
from paceline.config.sft import is_sft
from paceline.telemetry.causes.records import RankCauses, StepCauses, read_causes, total_cells
from paceline.telemetry.roofline import Roofline, read_roofline
from paceline.types import CAUSES

_NUM_UNKNOWN_SHOWN = 10
_FILE_WIDTH = 130


def profile_recipe(
    recipe: Annotated[str, typer.Argument(help="YAML recipe; settings are also given as section.key=value.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings: section.key=value ...", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to run; the last one is profiled.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Run a few steps of a recipe and show where the time of the last one went, by stage and cause."""
    config = profiling_config(*_split(recipe, overrides or []), steps)
    from paceline.api import start_sft, start_training

    with _standard_output_to_error() if as_json else nullcontext():
        run_dir = (start_sft if is_sft(config) else start_training)(config).dir
    if not speaks_for_the_run(own_placement()):
        return
    if as_json:
        print(json.dumps(profile_figures(run_dir), indent=2))
    else:
        console = Console(highlight=False)
        print_profile(
            run_dir, console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)
        )


@contextmanager
def _standard_output_to_error() -> Iterator[None]:
    """What the run and its ranks' processes print goes to standard error, so that the output is JSON alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _split(recipe: str, overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    if "=" in recipe and not Path(recipe).exists():
        return None, [recipe, *overrides]
    return recipe, list(overrides)


def profiling_config(recipe: str | None, overrides: Sequence[str], steps: int) -> Config:
    """The recipe's run cut down to `steps` steps: no evaluation, no checkpoint, a folder of its own.

    Settings in `overrides` win over what is set here.

    Raises:
        ConfigError: the recipe is refused.
    """
    supervised = _is_supervised(recipe, overrides)
    cut = ["run.resume=never", "run.eval_every=0", "task.eval_size=0", "task.eval_path=null"]
    cut += ["checkpoint.every=0", "checkpoint.save_final=false", "checkpoint.export_hf=false"]
    cut += [f"telemetry.profile_every={steps}", "train.warmup_steps=0"]
    if supervised:
        cut += [f"sft.max_steps={steps}"]
    else:
        cut += [f"run.num_steps={steps}", "critic.pretrain_steps=0", "critic.warmup_steps=0"]
    load = load_sft_config if supervised else load_config
    config = load(recipe, [*cut, *overrides])
    if any(one.startswith("run.name=") for one in overrides):
        return config
    name = free_name(Path(config.run.dir), f"{config.run.name}-profile")
    return load(recipe, [*cut, *overrides, f"run.name={name}"])


def _is_supervised(recipe: str | None, overrides: Sequence[str]) -> bool:
    try:
        return is_sft(load_config(recipe, overrides))
    except ConfigError:
        # refused as a whole: it is refused again, with its reasons, by the loader of the kind it looks like
        return any(one.startswith("sft.") for one in overrides)


def free_name(folder: Path, name: str) -> str:
    """`name`, or with the first number after it that no run in the folder has."""
    taken = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(one for one in numbered if one not in taken)


def profile_figures(run_dir: Path) -> dict[str, Any]:
    """What `--json` prints: cells by rank, mean over profiled steps, unknown kernels and the roofline."""
    return {
        "run": str(run_dir),
        "ranks": [_rank_figures(rank) for rank in read_causes(run_dir)],
        "roofline": read_roofline(run_dir).as_dict(),
    }


def _rank_figures(rank: RankCauses) -> dict[str, Any]:
    count = len(rank.steps)
    cells = {
        stage: {cause: seconds / count for cause, seconds in found.items()}
        for stage, found in total_cells(rank.steps).items()
    }
    return {
        "rank": rank.rank,
        "steps": [step.step for step in rank.steps],
        "basis": rank.steps[-1].basis if rank.steps else None,
        "is_complete": all(step.is_complete for step in rank.steps),
        "seconds": sum(step.seconds for step in rank.steps) / count if count else None,
        "cells": cells,
        "unknown_kernels": unknown_seconds(rank.steps),
    }


def unknown_seconds(steps: Sequence[StepCauses]) -> dict[str, float]:
    """Seconds per step of kernels that no pattern knows, the longest first."""
    found: dict[str, float] = {}
    for step in steps:
        for kernel in step.unknown_kernels():
            found[kernel.name] = found.get(kernel.name, 0.0) + kernel.total_s / len(steps)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def print_profile(run_dir: Path, console: Console) -> None:
    """A table per rank, kernels that no pattern knows, the roofline, and where it all came from."""
    ranks = read_causes(run_dir)
    if not ranks:
        console.print(f"No step of {run_dir} was profiled: telemetry.profile_every says how often.")
        return
    for rank in ranks:
        console.print(cells_table(rank))
        for name, seconds in list(unknown_seconds(rank.steps).items())[:_NUM_UNKNOWN_SHOWN]:
            console.print(
                f"no pattern knows {name}: {seconds * 1000:.3f} ms per step, counted as compute", markup=False
            )
        if not all(step.is_complete for step in rank.steps):
            console.print(
                "The profiler's buffers were full before the step's end: what ran after counts as idle."
            )
    console.print(roofline_table(read_roofline(run_dir)))
    sources = {"device": "device kernels", "operators": "host operators: there is no device"}
    basis = sources[ranks[0].steps[-1].basis]
    console.print(
        f"From {basis}; stages from the ledger. Records: {run_dir}/causes", soft_wrap=True, markup=False
    )


def cells_table(rank: RankCauses) -> Table:
    """Stages by causes of one rank, in milliseconds per step, mean over its profiled steps."""
    count = len(rank.steps)
    numbers = ", ".join(str(step.step) for step in rank.steps)
    table = Table(title=f"rank {rank.rank}, step {numbers}: milliseconds", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for name in (*CAUSES, "all", "share"):
        table.add_column(name, justify="right")
    whole = sum(step.seconds for step in rank.steps)
    totals = total_cells(rank.steps)
    for stage, cells in sorted(totals.items(), key=lambda pair: -sum(pair[1].values())):
        seconds = sum(cells.values())
        values = [_milliseconds(cells[cause] / count) for cause in CAUSES]
        table.add_row(stage, *values, _milliseconds(seconds / count), f"{seconds / whole:.1%}")
    table.add_section()
    by_cause = [sum(cells[cause] for cells in totals.values()) for cause in CAUSES]
    table.add_row(
        "step", *(_milliseconds(one / count) for one in by_cause), _milliseconds(whole / count), "100.0%"
    )
    table.add_row("share", *(f"{one / whole:.1%}" for one in by_cause), "", "", style="dim")
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}" if seconds > 0 else "-"


def roofline_table(roofline: Roofline) -> Table:
    """Achieved figures of every stage that declared work, without the profiled steps where there are others."""
    table = Table(title=f"roofline ({_ceilings_text(roofline)})", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for name in (
        "seconds",
        "TFLOP/s",
        "of peak",
        "GB/s at least",
        "of peak",
        "FLOP/byte",
        "bound",
        "of roofline",
    ):
        table.add_column(name, justify="right")
    for stage in roofline.stages:
        table.add_row(
            stage.stage,
            f"{stage.seconds:.3f}",
            _figure(stage.tflops),
            _share(stage.compute_share),
            _figure(stage.gbs),
            _share(stage.memory_share),
            _figure(stage.intensity),
            stage.bound or "-",
            _share(stage.floor_share),
        )
    return table


def _ceilings_text(roofline: Roofline) -> str:
    if roofline.ceilings is None:
        return "no ceilings are known: paceline doctor --measure finds them once"
    kind = "measured" if roofline.ceilings.is_measured else "data sheet"
    peaks = [f"{_figure(roofline.peak_tflops)} TFLOP/s", f"{_figure(roofline.peak_gbs)} GB/s"]
    return f"{roofline.ceilings.device_name}, {kind}: {', '.join(peaks)}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
