"""An ablation from plan to record: runs every arm, and compares what they left."""

from collections.abc import Callable
from itertools import chain

from paceline.lab.arms import RECORDING
from paceline.lab.comparison import Comparison, Runs, compare_arms
from paceline.lab.measurements import arm_figures, environment_of, measure
from paceline.lab.plan import Plan
from paceline.lab.predictions import saved_by_feature
from paceline.lab.results import BASELINE, Ablation, RunEntry, Status, write_ablation
from paceline.lab.runs import entries, run_all, run_dir
from paceline.lab.text import markdown

TABLE_FILE = "ablation.md"


def ablate(plan: Plan, say: Callable[[str], None]) -> Ablation:
    """Runs the plan, or what is left of it, and writes `ablation.json` and `ablation.md` after every round.

    Raises:
        ConfigError: the plan's folder holds another ablation or is in use.
        AblationFailedError: the baseline or the recording failed.
    """

    def write() -> None:
        ablation = evaluate(plan)
        write_ablation(plan.folder, ablation)
        (plan.folder / TABLE_FILE).write_text(markdown(ablation), encoding="utf-8")

    run_all(plan, say, after_round=write)
    write()
    return evaluate(plan)


def evaluate(plan: Plan) -> Ablation:
    """Compares the runs that are done so far."""
    found = entries(plan)
    done = [entry for entry in found if entry.status == "completed" and entry.arm != RECORDING]
    runs = {arm.name: _runs(plan, done, arm.name) for arm in plan.arms}
    measured = list(chain.from_iterable(by_round.values() for by_round in runs.values()))
    settings = plan.settings
    steps = range(1, settings.num_steps + 1)
    dropped = set(range(1, settings.num_warmup + 1)).union(*(run.profiled for run in measured))
    kept = tuple(step for step in steps if step not in dropped)
    baseline = runs[BASELINE]
    first = baseline[min(baseline)].folder if baseline else None
    environment = {} if first is None else environment_of(first)
    comparison = Comparison(
        kept=kept,
        all_steps=tuple(steps),
        alpha=settings.alpha,
        margin=settings.margin,
        mode=plan.mode,
        is_supervised=plan.command == "sft",
        saved=saved_by_feature(
            [run.folder for run in baseline.values()],
            dict.fromkeys(feature for arm in plan.arms for feature in arm.features),
        ),
        dtype=environment.get("dtype") or "float32",
    )
    arms = [(arm, runs[arm.name]) for arm in plan.arms[1:]]
    is_over = all(entry.status != "pending" for entry in found) or not _anything_left(found)
    status: Status = "complete" if is_over else "running"
    return Ablation(
        name=plan.folder.name,
        status=status,
        recipe=plan.recipe or "",
        overrides=plan.overrides,
        alpha=settings.alpha,
        margin=settings.margin,
        num_pairs=settings.num_pairs,
        num_steps=settings.num_steps,
        num_warmup=settings.num_warmup,
        dropped_steps=tuple(sorted(dropped)),
        replayed=plan.mode == "replay",
        baseline=arm_figures(BASELINE, list(baseline.values()), kept),
        rows=tuple(compare_arms(comparison, baseline, arms, _failures(found))) if kept else (),
        runs=found,
        environment=environment,
    )


def _runs(plan: Plan, done: list[RunEntry], arm: str) -> Runs:
    wanted = {entry.round for entry in done if entry.arm == arm}
    return {
        run.round: measure(run_dir(plan, run))
        for run in plan.runs()
        if run.arm == arm and run.round in wanted
    }


def _anything_left(found: tuple[RunEntry, ...]) -> bool:
    """Whether a run is pending whose arm has not turned out to be impossible."""
    possible = {entry.arm for entry in found if entry.status == "completed"}
    impossible = {entry.arm for entry in found if entry.status in ("failed", "refused")} - possible
    return any(entry.status == "pending" and entry.arm not in impossible for entry in found)


def _failures(found: tuple[RunEntry, ...]) -> dict[str, tuple[int, str]]:
    failed: dict[str, tuple[int, str]] = {}
    for entry in found:
        if entry.status in ("failed", "refused"):
            failed[entry.arm] = (failed.get(entry.arm, (0, ""))[0] + 1, entry.message)
    return failed
