"""`paceline ablate RECIPE --features a,b,c`: which features make a run faster, by how much, and as predicted?"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.endings import FAILED
from paceline.config import ConfigError
from paceline.lab.ablate import ablate
from paceline.lab.arms import as_overrides, combine, parse_features
from paceline.lab.plan import AblationSettings, Plan, make_plan
from paceline.lab.results import BASELINE
from paceline.lab.runs import AblationFailedError
from paceline.lab.text import markdown


def ablate_recipe(
    recipe: Annotated[
        str, typer.Argument(help="YAML recipe of the baseline; or section.key=value settings alone.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings of the baseline: section.key=value ...")
    ] = None,
    features: Annotated[
        list[str] | None,
        typer.Option(
            help="Features of the feature map by id, and NAME:section.key=value,section.key=value; commas "
            "between, or several times."
        ),
    ] = None,
    combinations: Annotated[
        list[str] | None, typer.Option("--combine", help="Features together: a+b, or all; several times.")
    ] = None,
    pairs: Annotated[
        int, typer.Option(help="Runs of every arm, each paired with one of the baseline; a verdict takes 4.")
    ] = 6,
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 8,
    warmup: Annotated[int, typer.Option(help="First steps of a run that do not count.")] = 2,
    rollouts: Annotated[
        str,
        typer.Option(
            help="replay: record one rollout and train every run on it; sample: every run samples; auto: "
            "replay where all features act on training alone."
        ),
    ] = "auto",
    alpha: Annotated[float, typer.Option(help="Chance of any false verdict, over all features.")] = 0.05,
    margin: Annotated[
        float, typer.Option(help="Relative difference of step times that counts as none.")
    ] = 0.02,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the ablation; one begun there is gone on with.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print ablation.json on standard output.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every arm, print the plan, start nothing.")
    ] = False,
) -> None:
    """Compare features with a baseline in paired runs: gain with its interval, verdict, prediction, correctness."""
    arms = parse_features(features or [])
    arms += combine(arms, combinations or [])
    given = list(overrides or [])
    if "=" in recipe and not Path(recipe).exists():
        given.insert(0, recipe)
    settings = _settings(pairs, steps, warmup, alpha, margin, rollouts)
    plan = make_plan(None if given and given[0] == recipe else recipe, given, arms, settings, out)
    if dry_run:
        print(_plan_text(plan))
        return
    try:
        result = ablate(plan, lambda line: print(line, file=sys.stderr, flush=True))
    except AblationFailedError as error:  # the run has said the rest; where this process stood helps nobody
        print(f"failed: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from error
    print(json.dumps(result.as_dict(), indent=1) if as_json else markdown(result))


def _settings(
    pairs: int, steps: int, warmup: int, alpha: float, margin: float, rollouts: Any
) -> AblationSettings:
    if rollouts not in ("auto", "replay", "sample"):
        raise ConfigError("--rollouts", rollouts, "must be one of auto, replay, sample", "auto")
    return AblationSettings(pairs, steps, warmup, alpha, margin, rollouts)


def _plan_text(plan: Plan) -> str:
    lines = [f"folder    {plan.folder}", f"rollouts  {plan.mode}", f"settings  {' '.join(plan.shared)}"]
    for arm in plan.arms:
        changed = " ".join(as_overrides(arm.keys))
        lines.append(f"arm       {arm.name}  {changed if arm.name != BASELINE else 'the recipe as it is'}")
    runs = plan.runs()
    lines.append(f"runs      {len(runs)}, one at a time: {', '.join(run.name for run in runs[:8])} ...")
    return "\n".join(lines)
