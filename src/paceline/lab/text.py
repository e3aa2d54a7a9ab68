"""An ablation as Markdown, which reads as text in a terminal too."""

from collections.abc import Sequence

from paceline.lab.results import (
    Ablation,
    AblationRow,
    ArmFigures,
    Correctness,
    DifferenceInterval,
    FigureChange,
    RatioInterval,
)

_VERDICTS = {
    "faster": "faster",
    "slower": "**slower**",
    "no_difference": "no difference",
    "undecided": "undecided",
}
_REASONS = {
    "within_tolerance": "same",
    "beyond_tolerance": "**differs**",
    "not_finite": "**not finite**",
    "no_stated_tolerance": "no tolerance stated",
    "inputs_differ": "other samples",
    "baseline_not_repeatable": "baseline does not repeat itself",
    "no_pairs": "-",
}


def markdown(ablation: Ablation) -> str:
    """The tables: comparison, stages, correctness; and how they came about."""
    parts = [
        f"# Ablation `{ablation.name}`",
        _introduction(ablation),
        _table(*_main_table(ablation)),
        "## Seconds per step by stage",
        f"Mean over runs; the paired difference to the baseline with its {1 - ablation.alpha:.0%} interval, not "
        "corrected for the number of features.",
        _table(*_stage_table(ablation)),
        "## The same updates?",
        "Largest difference to the baseline over all steps of all pairs, loss in nats, gradient norm relative; "
        "beside it the feature's tolerance and the difference between two runs of the baseline itself.",
        _table(*_correctness_table(ablation)),
    ]
    failed = [row for row in ablation.rows if row.num_failed]
    if failed:
        parts += ["## Runs that did not finish"]
        parts += [f"- `{row.name}`, {_number_of('run', row.num_failed)}: {row.message}" for row in failed]
    return "\n\n".join(parts) + "\n"


def _introduction(ablation: Ablation) -> str:
    steps = ablation.num_steps - len(ablation.dropped_steps)
    input_is = (
        "All runs train on one recorded rollout, so a step has neither sampling nor scoring in it."
        if ablation.replayed
        else "Every run samples anew with the same seeds."
    )
    pairs = _number_of("pair", ablation.num_pairs)
    comparisons = _number_of("comparison", len(ablation.rows))
    progress = "" if ablation.status == "complete" else " **Not all runs are done.**"
    return (
        f"`{ablation.recipe}`, {pairs} of runs, each a process of its own with "
        f"{ablation.num_steps} steps of which {steps} count. {input_is} Ratios are to the baseline, below 1 is "
        f"faster; intervals and verdicts are corrected for {comparisons} (Holm, "
        f"{ablation.alpha:.0%} for any false call). Differences within {ablation.margin:.0%} count as none.{progress}"
    )


def _number_of(thing: str, count: int) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _main_table(ablation: Ablation) -> tuple[list[str], list[list[str]]]:
    # fmt: off
    header = ["Arm", "Pairs", "Step (s)", "Ratio", "Interval", "Verdict", "Saved (s)", "Predicted (s)",
              "Tokens/s/device", "MFU", "Peak memory", "Effective tokens", "Reward", "Loss", "Result"]
    # fmt: on
    rows = [] if ablation.baseline is None else [_baseline_cells(ablation.baseline)]
    return header, rows + [_row_cells(row) for row in ablation.rows]


def _baseline_cells(arm: ArmFigures) -> list[str]:
    return [
        f"`{arm.name}`",
        f"{arm.num_runs} runs",
        f"{arm.step_s:.3f}",
        *["-"] * 5,
        _number(arm.tokens_per_s_per_device, ",.1f"),
        _number(arm.mfu, ".3f"),
        _memory(arm),
        _number(arm.effective_share, ".2f"),
        _number(arm.reward, ".3f"),
        _number(arm.loss, ".2e"),
        "-",
    ]


def _row_cells(row: AblationRow) -> list[str]:
    arm = row.arm
    if arm is None:
        return [f"`{row.name}`", "0", *["-"] * 12, "could not be run"]
    return [
        f"`{row.name}`",
        str(row.num_pairs),
        f"{arm.step_s:.3f}",
        "-" if row.step_time is None else f"{row.step_time.ratio:.3f}",
        _interval(row.step_time),
        _VERDICTS[row.verdict],
        _difference(row.saved_s, ".3f"),
        _predicted(row),
        _number(arm.tokens_per_s_per_device, ",.1f"),
        _number(arm.mfu, ".3f"),
        _memory(arm),
        _number(arm.effective_share, ".2f"),
        _change(row.figures.get("reward"), "+.3f"),
        _change(row.figures.get("loss"), "+.1e"),
        _REASONS[row.correctness.reason],
    ]


def _stage_table(ablation: Ablation) -> tuple[list[str], list[list[str]]]:
    baseline = ablation.baseline
    known = [] if baseline is None else list(baseline.stages)
    stages = dict.fromkeys([*known, *(stage for row in ablation.rows for stage in row.stages)])
    rows = []
    if baseline is not None:
        rows.append(
            [f"`{baseline.name}`", *(_number(baseline.stages.get(stage, 0.0), ".3f") for stage in stages)]
        )
    for row in ablation.rows:
        cells = []
        for stage in stages:
            change = row.stages.get(stage)
            cells.append(
                "-"
                if change is None
                else f"{change.feature_s:.3f} ({_difference(change.difference_s, '+.3f')})"
            )
        rows.append([f"`{row.name}`", *cells])
    return ["Arm", *stages], rows


def _correctness_table(ablation: Ablation) -> tuple[list[str], list[list[str]]]:
    # fmt: off
    header = ["Arm", "Loss", "Tolerance", "Baseline's own", "Gradient norm", "Tolerance", "Baseline's own", "Result"]
    # fmt: on
    return header, [_correctness_cells(row.name, row.correctness) for row in ablation.rows]


def _correctness_cells(name: str, found: Correctness) -> list[str]:
    return [
        f"`{name}`",
        _number(found.loss_difference, ".1e"),
        _number(found.tolerance, ".0e"),
        _number(found.repeat_loss_difference, ".1e"),
        _number(found.grad_norm_difference, ".1e"),
        _number(found.grad_norm_tolerance, ".0e"),
        _number(found.repeat_grad_norm_difference, ".1e"),
        f"{found.status.replace('_', ' ')}: {_REASONS[found.reason]}",
    ]


def _predicted(row: AblationRow) -> str:
    found = row.predicted
    return "-" if found is None else f"{found.saved_s:.3f} [{found.low_s:.3f}, {found.high_s:.3f}]"


def _interval(ratio: RatioInterval | None) -> str:
    if ratio is None or ratio.low is None or ratio.high is None:
        return "-"
    return f"[{ratio.low:.3f}, {ratio.high:.3f}]"


def _difference(found: DifferenceInterval | None, form: str) -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return format(found.mean, form)
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def _change(change: FigureChange | None, form: str) -> str:
    return "-" if change is None else format(change.difference.mean, form)


def _memory(arm: ArmFigures) -> str:
    """Of the device where it has been measured, else of the host."""
    if arm.peak_memory:
        return f"{arm.peak_memory / 2**30:.2f} GiB"
    return "-" if arm.host_memory is None else f"{arm.host_memory / 2**30:.2f} GiB host"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
