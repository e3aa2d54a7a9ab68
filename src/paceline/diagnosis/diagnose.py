"""`diagnose`: a run's folder to what bounds it, what it waits for, what is wrong, and what would help."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from paceline.diagnosis.compute_costs import shapes_are_always_new, sizes_are_alike
from paceline.diagnosis.features import FEATURES
from paceline.diagnosis.findings import costs_of, standing_out
from paceline.diagnosis.ranks import diagnose_ranks
from paceline.diagnosis.results import Diagnosis, Switch
from paceline.diagnosis.run_records import RunRecords, read_run
from paceline.diagnosis.stages import bottleneck_of, diagnose_stages
from paceline.diagnosis.switches import best_switch, switches_for
from paceline.diagnosis.waiting_costs import find_drift
from paceline.diagnosis.waits import waits_of
from paceline.telemetry.records import RankLedger

COUNTED = (
    "micro_batches",
    "tokens/laid_out",
    "tokens/padding",
    "tokens/effective_share",
    "batch/new_shapes",
    "batch/distinct_shapes",
    "rollout/mean_running",
    "rollout/prefill_tokens",
    "rollout/preemptions",
    "rollout/preempted_tokens",
    "balance/tokens_max_over_mean",
    "balance/busy_max_over_mean",
    "memory/out_of_memory_retries",
    "reward/timeouts",
)
"""Metrics that a diagnosis shows as they are, where a run has them."""


def diagnose(
    run_dir: Path, ledgers: Sequence[RankLedger] | None = None, only: Collection[int] | None = None
) -> Diagnosis:
    """Diagnoses a finished, running or imported run from its records alone.

    `ledgers` are those of the run, where they were read already; with `only`, time statistics are of these steps, which
    must have their spans: of a run of many ranks and steps a part says as much.

    Raises:
        ConfigError: the folder is no run's, or its ledger holds no finished step.
        ValueError: a record is of a version this paceline does not read.
    """
    run = read_run(run_dir, ledgers, only)
    step_s = mean_step_s(run)
    stages = diagnose_stages(run, step_s)
    costs = costs_of(run, step_s)
    findings = standing_out(costs, step_s)
    unaccounted = run.per_step(lambda step: step.section.unaccounted_s)
    return Diagnosis(
        run_name=run.name,
        num_steps=len(run.steps),
        step_s=step_s,
        stages=stages,
        bottleneck=bottleneck_of(stages),
        waits=waits_of(run, costs, step_s),
        findings=findings,
        switches=switches_for(run, findings, stages, step_s),
        unaccounted_s=sum(unaccounted) / len(unaccounted),
        notes=notes_of(run),
        ranks=diagnose_ranks(run),
        drift=find_drift(run, step_s),
        counters=counters_of(run),
        num_warmup_steps=len(run.warmup),
        num_profiled_steps=run.num_slowed,
    )


def predict(run_dir: Path, feature: str) -> Switch | None:
    """What one feature of the map would save on a run, however little; None where it is on already, does not apply, or
    nothing it reduces was found.

    Raises:
        KeyError: the map has no such feature.
        ConfigError, ValueError: as `diagnose`.
    """
    run = read_run(run_dir)
    step_s = mean_step_s(run)
    return best_switch(run, FEATURES[feature], costs_of(run, step_s), diagnose_stages(run, step_s))


def mean_step_s(run: RunRecords) -> float:
    """Wall seconds of a step, mean over the ranks and steps that count."""
    walls = run.per_step(lambda step: step.wall_s)
    return sum(walls) / len(walls)


def counters_of(run: RunRecords) -> Mapping[str, float]:
    """Means per step of what was counted."""
    values = {name: run.mean_metric(name) for name in COUNTED}
    return {name: value for name, value in values.items() if value is not None}


def notes_of(run: RunRecords) -> tuple[str, ...]:
    """Ids of what is not or cannot be known, and an importer's own sentences."""
    notes = ["causes_of_profiled_steps" if run.profiled else "no_causes"]
    if run.profiled and set(run.steps) <= set(run.profiled):
        notes = ["all_profiled"]
    if run.is_imported:
        notes.append("imported")
    if len(run.ranks) == 1:
        notes.append("one_rank")
    if not run.warmup and not run.is_imported:
        notes.append("only_warmup")
    if len(run.steps) == 1:
        notes.append("one_step")
    if any(steps[step].section.num_spans_not_kept for steps in run.ranks.values() for step in run.steps):
        notes.append("spans_left_out")
    if run.has_device and not run.profiled:
        notes.append("host_clock")
    if shapes_are_always_new(run):
        notes.append("shapes_always_new")
    if sizes_are_alike(run):
        notes.append("sizes_alike")
    return (*notes, *map(str, run.summary.get("notes", ())))
