"""Two runs compared: differences are second minus first, with intervals, and what was changed is listed."""

import math
import statistics

import pytest
from report_runs import RunWriter

from paceline.cli.app import main
from paceline.report import write_comparison
from paceline.report.compare_page import build_comparison
from paceline.report.comparison import STEP, flat, setting_changes, stage_changes
from paceline.report.run_data import load_run
from paceline.report.words import Words

WORDS = Words("en")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same recipe; in the second every update takes half as long and one setting differs."""
    folder = tmp_path_factory.mktemp("compare")
    first = RunWriter(folder / "before", num_steps=20).write_all()
    second = RunWriter(folder / "after", num_steps=20, seed=5, update_share=0.5).write_all()
    config = second / "config.yaml"
    config.write_text(
        config.read_text().replace("lr: 1.0e-06", "lr: 3.0e-06").replace("lr: 1e-06", "lr: 3e-06")
    )
    return first, second


def test_a_stage_that_got_faster_is_found_with_its_interval(runs):
    first, second = map(load_run, runs)
    changes = {change.stage: change for change in stage_changes(first, second)}
    update = changes["update_actor"]
    one, two = ([step.stages["update_actor"].self_s for step in run.steps[1:]] for run in (first, second))
    assert update.first_s == pytest.approx(statistics.fmean(one))
    assert update.difference_s == pytest.approx(statistics.fmean(two) - statistics.fmean(one))
    half = 1.959964 * math.sqrt(statistics.variance(one) / 19 + statistics.variance(two) / 19)
    assert update.high == pytest.approx(update.difference_s + half, rel=1e-4)
    assert update.is_beyond_chance and update.high < 0


def test_stages_add_up_to_the_step_in_both_runs(runs):
    step, *stages = stage_changes(*map(load_run, runs))
    assert step.stage == STEP
    assert sum(change.first_s for change in stages) == pytest.approx(step.first_s)
    assert sum(change.second_s for change in stages) == pytest.approx(step.second_s)


def test_the_page_says_what_changed(runs):
    page = build_comparison(*map(load_run, runs), WORDS)
    assert "less" in page.sentences[0] and "actor update" in page.sentences[1]
    changed = next(section for section in page.sections if section.key == "changed").blocks[0]
    assert "train.lr" in [row.cells[0].text for row in changed.rows]
    assert {"compare-stages", "compare-time", "compare-reward"} <= {chart.key for chart in page.charts}


def test_a_run_against_itself_differs_in_nothing(runs):
    first = load_run(runs[0])
    changes = stage_changes(first, first)
    assert all(change.difference_s == 0 for change in changes)
    page = build_comparison(first, first, WORDS)
    assert "can be chance" in page.sentences[0]
    changed = next(section for section in page.sections if section.key == "changed").blocks[0]
    assert changed.rows == [] and changed.caption == "Nothing differs."


def test_settings_are_compared_by_their_dotted_names_without_the_runs_own():
    first = {"run": {"name": "a", "seed": 0}, "train": {"lr": 1.0}}
    second = {"run": {"name": "b", "seed": 0}, "train": {"lr": 2.0, "clip": None, "wd": 0.1}}
    changes = setting_changes(first, second)
    assert [(change.name, change.first, change.second) for change in changes] == [
        ("train.lr", 1.0, 2.0),
        ("train.wd", None, 0.1),
    ]
    assert flat({"a": {"b": {"c": 1}}}) == {"a.b.c": 1}


def test_a_run_without_steps_has_a_comparison_too(runs, tmp_path):
    writer = RunWriter(tmp_path / "empty", num_steps=0)
    writer.write_config()
    page = build_comparison(load_run(runs[0]), load_run(tmp_path / "empty"), WORDS)
    assert "cannot be compared" in page.sentences[0]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_command_writes_the_comparison_into_the_second_runs_folder(runs, capsys, lang):
    assert main(["report", str(runs[0]), str(runs[1]), "--lang", lang]) == 0
    assert capsys.readouterr().out.strip() == str(runs[1] / "comparison.html")
    assert write_comparison(*runs, lang).stat().st_size < 5e6


def test_a_second_folder_that_is_no_run_and_an_unknown_language_are_refused(runs, tmp_path, capsys):
    assert main(["report", str(runs[0]), str(tmp_path)]) == 2
    assert "folder of a run" in capsys.readouterr().err
    assert main(["report", str(runs[0]), "--lang", "fr"]) == 2
    assert "en, zh" in capsys.readouterr().err
