"""Every number of an explanation is one of the records: found again in the files' raw lines."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from explained_runs import CAUSES, PlannedRun, RawRun, paired_figures
from tiny_runs import tiny_sections

from paceline.config import load_config
from paceline.explanation import Explanation, explain
from paceline.explanation.explain import AUDIENCES, templates_in
from paceline.schedules import run_training
from paceline.telemetry.causes.records import StepCauses, cause_lines

LANGUAGES = ("en", "zh")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def numbers(text: str) -> list[str]:
    """Numbers in a text, without those in code spans (settings, names of runs) and in quotes (features, notes)."""
    return NUMBER.findall(re.sub(r'`[^`]*`|"(?:[^"\\]|\\.)*"|“[^”]*”', "", text))


def check(found: Explanation, records: dict[str, float]) -> None:
    """The text's numbers are the figures' ones, and every figure is the records' one."""
    assert numbers(found.text) == [one for figure in found.figures for one in numbers(figure.text)]
    for figure in found.figures:
        near = 0.02 if figure.key.startswith(("change_low/", "change_high/")) else 1e-6
        assert figure.value == pytest.approx(records[figure.key], rel=near, abs=1e-12), figure.key


@dataclass
class Planned:
    one_rank: Path
    four_ranks: Path
    profiled: Path
    better: Path


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    folder = tmp_path_factory.mktemp("planned")
    profiled = PlannedRun(folder / "profiled", num_steps=9).write()
    cells = {
        "rollout": {"compute": 0.5, "memory": 1.1, "scheduling": 0.3},
        "update_actor": {"compute": 1.9, "memory": 0.4, "communication": 0.2, "queue": 0.1},
        "checkpoint": {"queue": 0.2},
        "unaccounted": {"scheduling": 0.02},
    }
    whole = {stage: dict.fromkeys(CAUSES, 0.0) | part for stage, part in cells.items()}
    (profiled / "causes").mkdir()
    with (profiled / "causes" / "rank0.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in cause_lines(StepCauses(4, whole)))
    better = PlannedRun(folder / "better", seed=1, slower=(1.0, 1.0), tokens=(1000, 1000))
    better.stages |= {("reward", "queue"): 0.04, ("update_actor", ""): 2.1}
    return Planned(
        one_rank=PlannedRun(folder / "one").write(),
        four_ranks=PlannedRun(
            folder / "four-4",
            slower=(1.0, 1.05, 1.6, 1.0),
            tokens=(900, 1000, 1700, 950),
            metrics={"memory/out_of_memory_retries": 2.0, "reward/judge/retries": 1.0},
        ).write(),
        profiled=profiled,
        better=better.write(),
    )


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("audience", AUDIENCES)
@pytest.mark.parametrize("name", ["one_rank", "four_ranks", "profiled"])
def test_every_number_is_in_the_records(planned: Planned, name: str, audience, lang) -> None:
    run_dir = getattr(planned, name)
    check(explain(run_dir, lang=lang, audience=audience), RawRun(run_dir).figures())


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("audience", AUDIENCES)
@pytest.mark.parametrize(
    "pair", [("better", "four_ranks"), ("four_ranks", "better"), ("one_rank", "profiled")]
)
def test_every_number_of_a_comparison_is_in_both_records(planned: Planned, pair, audience, lang) -> None:
    run_dir, other = (getattr(planned, name) for name in pair)
    raw, raw_other = RawRun(run_dir), RawRun(other)
    found = explain(run_dir, other, lang, audience)
    check(found, raw.figures() | paired_figures(raw, raw_other))
    assert any(figure.key == "change/step" for figure in found.figures)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_number_of_a_run_that_trained_is_in_its_records(trained: Path, lang) -> None:
    for audience in AUDIENCES:
        check(explain(trained, lang=lang, audience=audience), RawRun(trained).figures())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    sections = tiny_sections(folder, run={"num_steps": 5}, telemetry={"profile_every": 3})
    return run_training(load_config(None, sections=sections)).run_dir


def test_the_causes_of_a_profiled_run_add_up_to_the_step(trained: Path) -> None:
    values = {figure.key: figure.value for figure in explain(trained).figures}
    causes = sum(value for key, value in values.items() if key.startswith("cause_s/"))
    unaccounted = RawRun(trained).figures()["unaccounted_s"]
    # the evaluation lies in the last step, which is not profiled
    assert values["uncovered_s"] == pytest.approx(values["stage_s/eval"], rel=1e-6)
    whole = causes + values["uncovered_s"] + values.get("stage_s/checkpoint", 0.0) + unaccounted
    assert whole == pytest.approx(values["step_s"], rel=1e-6)


def test_templates_hold_no_number_of_their_own() -> None:
    for lang in LANGUAGES:
        for key, text in templates_in(lang).items():
            assert not re.search(r"\d", text), f"{lang}: {key}"
