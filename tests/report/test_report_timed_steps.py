"""Mean times leave out warm-up and steps that ran under a profiler, as a diagnosis does."""

import pytest
from report_runs import RunWriter

from paceline.diagnosis import diagnose
from paceline.report.figures import figures_of
from paceline.report.rows import stage_table
from paceline.report.run_data import load_run
from paceline.report.sentences import summary_sentences
from paceline.report.stage_totals import rank_rows, stage_rows
from paceline.report.tiles import tiles
from paceline.report.words import Words


def run_with(tmp_path, profiled):
    marks = {step: {"profiled": 1.0} for step in profiled}
    return load_run(RunWriter(tmp_path / str(len(profiled)), num_steps=4, metric_overrides=marks).write_all())


def test_warm_up_and_profiled_steps_are_in_no_mean_time_unless_all_were(tmp_path):
    run = run_with(tmp_path, [2])
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert [step.step for step in run.timed_steps] == [3, 4]
    mean = sum(step.wall_s for step in run.steps[2:]) / 2
    assert sum(row.seconds for row in stage_rows(run)) == pytest.approx(mean)
    assert run_with(tmp_path, [1, 2, 3, 4]).timed_steps == run_with(tmp_path, [1, 2, 3, 4]).steps
    assert [step.step for step in run_with(tmp_path, []).timed_steps] == [2, 3, 4]


def test_page_and_diagnosis_take_the_same_steps(tmp_path):
    run = run_with(tmp_path, [2])
    found = diagnose(run.run_dir)
    assert found.num_steps == len(run.timed_steps)
    assert found.step_s == pytest.approx(sum(step.wall_s for step in run.timed_steps) / 2)


def test_every_figure_of_a_step_is_taken_from_the_same_steps(tmp_path):
    run, words = run_with(tmp_path, [2]), Words("en")
    figures, rows = figures_of(run), stage_rows(run)
    assert (figures["num_steps"], figures["num_untimed_steps"]) == (4, 2)
    assert figures["step_time_s"] == pytest.approx(sum(row.seconds for row in rows))
    assert figures["unaccounted_s"] == pytest.approx(rows[-1].seconds)
    assert figures["stages"] == pytest.approx({row.stage: row.seconds for row in rows[:-1]})
    update = next(row for row in rows if row.stage == "update_actor")
    assert figures["update_actor_share"] == pytest.approx(update.share)
    assert rank_rows({0: run.timed_of(run.steps)})[0].step_s == pytest.approx(figures["step_time_s"])
    rates = [
        (record.metrics["throughput/tokens_per_s"], record.metrics["time/step"])
        for record in run.history.records
        if record.step not in (0, 1, 2)  # 0 is the evaluation before training
    ]
    expected = sum(rate * seconds for rate, seconds in rates) / sum(seconds for _, seconds in rates)
    assert figures["tokens_per_s"] == pytest.approx(expected)

    table = stage_table(rows, figures, 0, words)
    assert "1 warm-up and 1 profiled steps are in no" in table.caption
    time = table.foot.cells[2].text
    assert tiles(figures, words)[1].value == time
    assert any(time in sentence for sentence in summary_sentences(figures, words))
    assert "profiler" not in stage_table(rows, {**figures, "num_untimed_steps": 0}, 0, words).caption
