"""The same as the command line, from Python. Importing it loads no torch; training does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.config import Config, load_config, load_sft_config


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder and what can be made of it."""

    dir: Path

    def report(self, lang: Literal["en", "zh"] = "en") -> Path:
        """Writes the report, one HTML file, in English or Chinese, and returns its path."""
        from paceline.report import write_report

        return write_report(self.dir, lang)

    def figures(self) -> dict[str, Any]:
        """The report's figures: what `paceline report --json` prints."""
        from paceline.report import report_figures

        return report_figures(self.dir)

    def explain(
        self, against: "Path | Run | None" = None, lang: str = "en", audience: str = "engineer"
    ) -> str:
        """Half a page of words: what `paceline explain` prints.

        Raises:
            paceline.ConfigError: the run has no finished step, or there are no texts for `lang` or `audience`.
        """
        from paceline.diagnosis.wording import checked_language
        from paceline.explanation.explain import checked_audience, explain

        other = against.dir if isinstance(against, Run) else against
        return explain(self.dir, other, checked_language(lang), checked_audience(audience)).text


def train(
    recipe: str | Path | None = None, *, overrides: Sequence[str] = (), **sections: Mapping[str, Any]
) -> Run:
    """Trains to the end and returns the run.

    With `cluster.num_devices` above 1 the ranks are processes of their own, started and awaited here.

    `recipe` is a YAML file or None. Settings come as keywords, one per section, `train={"lr": 1e-5}`, or as texts,
    `overrides=["train.lr=1e-5"]`; the texts win over the keywords, and both over the recipe.

    Raises:
        paceline.ConfigError: refused before anything started; the message names the setting and what would do.
        paceline.launch.ranks.RankFailedError: a rank failed while running.
    """
    return start_training(load_config(recipe, overrides, sections=sections))


def start_training(config: Config) -> Run:
    """The same from a checked config."""
    from paceline.launch.dispatch import run_or_launch

    def run_here(config: Config) -> Path:
        from paceline.schedules import run_training  # not needed where ranks are only started

        return Path(run_training(config).run_dir)

    return Run(run_or_launch(config, "train", run_here))


def sft(
    recipe: str | Path | None = None, *, overrides: Sequence[str] = (), **sections: Mapping[str, Any]
) -> Run:
    """Supervised fine-tuning: the same arguments, result and errors as `train`."""
    return start_sft(load_sft_config(recipe, overrides, sections=sections))


def start_sft(config: Config) -> Run:
    """The same from a checked config."""
    from paceline.launch.dispatch import run_or_launch

    def run_here(config: Config) -> Path:
        from paceline.schedules import run_sft  # not needed where ranks are only started

        return Path(run_sft(config).run_dir)

    return Run(run_or_launch(config, "sft", run_here))
