"""`diagnose`: a run's folder to what bounds it, what it waits for, what is wrong, and what would help."""

from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.diagnosis.results import Diagnosis
from paceline.diagnosis.run_records import RunRecords, read_run
from paceline.diagnosis.stages import bottleneck_of, diagnose_stages
from paceline.telemetry.records import RankLedger


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
    walls = run.per_step(lambda step: step.wall_s)
    step_s = sum(walls) / len(walls)
    stages = diagnose_stages(run, step_s)
    unaccounted = run.per_step(lambda step: step.section.unaccounted_s)
    return Diagnosis(
        run_name=run.name,
        num_steps=len(run.steps),
        step_s=step_s,
        stages=stages,
        bottleneck=bottleneck_of(stages),
        waits=(),
        findings=(),
        switches=(),
        unaccounted_s=sum(unaccounted) / len(unaccounted),
        notes=notes_of(run),
        num_warmup_steps=len(run.warmup),
        num_profiled_steps=len(run.profiled),
    )


def notes_of(run: RunRecords) -> tuple[str, ...]:
    """Ids of what is not or cannot be known, and an importer's own sentences."""
    notes = ["causes_of_profiled_steps" if run.profiled else "no_causes"]
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
    return (*notes, *map(str, run.summary.get("notes", ())))
