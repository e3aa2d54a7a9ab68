"""`make demo`: bring the weights, train the demo's recipe, write the report, say what came of it.

usage: python -m paceline.demo [section.key=value ...]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.config import Config, ConfigError, load_config

RECIPE = Path(__file__).parents[3] / "recipes" / "demo.yaml"


def main(overrides: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed while running, 2 refused before starting."""
    console = Console()
    console.print("paceline demo: SmolLM2-135M learns to reverse lists of words, with GRPO, on this machine.")
    try:
        config = load_config(RECIPE, [_free_name(overrides), *overrides], base={"model": {"path": "demo"}})
        console.print("  loading PyTorch and transformers ...")
        # torch takes seconds to import: something must be on the screen before
        from paceline.demo.weights import WeightsError, ensure_smollm2
        from paceline.report import report_figures, write_report
        from paceline.schedules import run_training

        try:
            weights = ensure_smollm2()
        except WeightsError as error:
            console.print(f"refused: {error}", style="red")
            return 2
        result = run_training(_with_model(config, weights), console)
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    report = write_report(result.run_dir)
    _summarise(console, report_figures(result.run_dir), report)
    return 0


def _free_name(overrides: Sequence[str]) -> str:
    """A finished demo is not continued: the next one gets the next free name."""
    directory = next((o.partition("=")[2] for o in overrides if o.startswith("run.dir=")), "runs")
    number = 1
    while (Path(directory) / _name(number) / "report.html").exists():
        number += 1
    return f"run.name={_name(number)}"


def _name(number: int) -> str:
    return "demo" if number == 1 else f"demo-{number}"


def _with_model(config: Config, path: Path) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})


def _summarise(console: Console, figures: dict[str, object], report: Path) -> None:
    """The result in a few lines."""
    table = Table(title="Result", title_justify="left", show_header=False, box=None, padding=(0, 2))
    rows = (
        ("held-out accuracy before", "accuracy_before", "{:.1%}"),
        ("held-out accuracy after", "accuracy_after", "{:.1%}"),
        ("best constant answer", "accuracy_constant", "{:.1%}"),
        ("step time", "step_time_median_s", "{:.1f} s"),
        ("share of the step in the update", "update_actor_share", "{:.0%}"),
        ("share of wall time accounted for", "accounted_fraction_run", "{:.2%}"),
    )
    for label, key, form in rows:
        value = figures.get(key)
        table.add_row(label, "unknown" if value is None else form.format(value))
    console.print(table)
    console.print(f"Report: {report.resolve()}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
