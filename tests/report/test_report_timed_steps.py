"""Mean times leave out steps that ran under a profiler."""

import pytest
from report_runs import RunWriter

from paceline.report.run_data import load_run
from paceline.report.stage_totals import stage_rows


def run_with(tmp_path, profiled):
    marks = {step: {"profiled": 1.0} for step in profiled}
    return load_run(RunWriter(tmp_path / str(len(profiled)), num_steps=4, metric_overrides=marks).write_all())


def test_profiled_steps_are_in_no_mean_time_unless_all_were(tmp_path):
    run = run_with(tmp_path, [2])
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert [step.step for step in run.timed_steps] == [1, 3, 4]
    mean = sum(step.wall_s for step in run.steps if step.step != 2) / 3
    assert sum(row.seconds for row in stage_rows(run)) == pytest.approx(mean)
    assert run_with(tmp_path, [1, 2, 3, 4]).timed_steps == run_with(tmp_path, [1, 2, 3, 4]).steps
    assert [step.step for step in run_with(tmp_path, []).timed_steps] == [1, 2, 3, 4]
