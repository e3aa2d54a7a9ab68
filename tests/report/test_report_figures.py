"""The report's figures follow from the records, and say None where nothing is known."""

import json
import math

import pytest
from report_runs import RunWriter

from paceline.report import report_figures
from paceline.report.intervals import difference_interval, wilson_interval

PROMISED_KEYS = {
    "accounted_fraction",
    "accounted_fraction_run",
    "step_time_s",
    "stages",
    "unaccounted_s",
    "mfu",
    "accuracy_before",
    "accuracy_after",
    "accuracy_constant",
    "num_steps",
    "tokens_per_s",
    "reward_first",
    "reward_last",
    "peak_memory",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return RunWriter(tmp_path_factory.mktemp("runs") / "finished", num_steps=12).write_all()


def test_all_promised_figures_are_there_and_are_strict_json(finished):
    figures = report_figures(finished)
    assert set(figures) >= PROMISED_KEYS
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_stages_and_unaccounted_time_add_up_to_the_step(finished):
    figures = report_figures(finished)
    assert figures["num_steps"] == 12
    total = sum(figures["stages"].values()) + figures["unaccounted_s"]
    assert total == pytest.approx(figures["step_time_s"], rel=1e-9)
    assert figures["unaccounted_s"] == pytest.approx(0.006)
    assert figures["accounted_fraction"] == pytest.approx(1 - 0.006 / figures["step_time_s"])
    assert figures["accounted_fraction_run"] < 1
    training = figures["stages"]["update_actor"] / figures["step_time_s"]
    assert figures["update_actor_share"] == pytest.approx(training)
    assert figures["non_training_share"] == pytest.approx(1 - training)


def test_throughput_is_all_tokens_over_all_seconds_not_a_mean_of_rates(finished):
    figures = report_figures(finished)
    assert figures["tokens_per_s"] == pytest.approx(7000 / figures["step_time_s"])


def test_accuracies_and_their_intervals_come_from_the_summary(finished):
    figures = report_figures(finished)
    assert figures["accuracy_before"] == 23 / 128
    assert figures["accuracy_after"] == 61 / 128
    assert figures["accuracy_constant"] == 2 / 128
    assert figures["accuracy_before_interval"] == pytest.approx(wilson_interval(23 / 128, 128))
    assert figures["accuracy_change_interval"][0] > 0


def test_without_a_summary_accuracies_come_from_the_metrics(tmp_path):
    writer = RunWriter(tmp_path / "killed", num_steps=4)
    writer.write_config()
    writer.write_process(range(1, 5))
    figures = report_figures(tmp_path / "killed")
    assert (figures["accuracy_before"], figures["accuracy_after"]) == (23 / 128, 61 / 128)
    assert figures["accuracy_constant"] is None
    assert figures["status"] == "unknown"


def test_a_run_that_stopped_before_the_last_evaluation_has_no_accuracy_after(tmp_path):
    writer = RunWriter(tmp_path / "killed", num_steps=9)
    writer.write_config()
    writer.write_process(range(1, 4))
    figures = report_figures(tmp_path / "killed")
    assert figures["accuracy_before"] == 23 / 128
    assert figures["accuracy_after"] is None
    assert figures["accuracy_change_interval"] is None


def test_mfu_is_unknown_on_a_cpu_and_measured_against_the_table_on_a_known_device(tmp_path):
    on_cpu = report_figures(RunWriter(tmp_path / "cpu", num_steps=3).write_all())
    assert on_cpu["mfu"] is None and on_cpu["mfu_step"] is None and on_cpu["peak_tflops"] is None
    assert on_cpu["tflops_update_actor"] > 0
    on_h200 = report_figures(RunWriter(tmp_path / "h200", num_steps=3, device_name="NVIDIA H200").write_all())
    seconds = on_h200["stages"]["update_actor"]
    assert on_h200["mfu"] == pytest.approx(4.1e12 / seconds / 989e12)
    assert on_h200["mfu_step"] == pytest.approx(4.8e12 / on_h200["step_time_s"] / 989e12)


def test_a_stated_peak_gives_an_mfu_on_unknown_hardware(tmp_path):
    run_dir = RunWriter(tmp_path / "stated", num_steps=2).write_all()
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("peak_tflops: null", "peak_tflops: 10.0"))
    assert report_figures(run_dir)["peak_tflops"] == 10.0
    assert report_figures(run_dir)["mfu"] > 0


def test_a_step_done_again_after_a_resume_counts_once_as_done_last(tmp_path):
    writer = RunWriter(tmp_path / "resumed", num_steps=8)
    writer.write_config()
    writer.write_process(range(1, 7))
    writer.metric_overrides = {5: {"reward/mean": 0.75}, 8: {"reward/mean": 0.875}}
    writer.write_process(range(5, 9))
    figures = report_figures(tmp_path / "resumed")
    assert figures["num_steps"] == 8
    assert figures["reward_last"] == 0.875
    assert figures["counters"]["run/steps_done_again"] == 2
    assert figures["counters"]["run/restarts"] == 1


def test_values_that_are_not_finite_are_counted_and_never_printed(tmp_path):
    overrides = {2: {"grad_norm": math.nan, "reward/mean": math.nan}, 3: {"grad_norm": math.inf}}
    writer = RunWriter(tmp_path / "nan", num_steps=3, metric_overrides=overrides)
    figures = report_figures(writer.write_all())
    json.dumps(figures, allow_nan=False)
    assert figures["counters"]["not finite: grad_norm"] == 2
    assert figures["counters"]["not finite: reward/mean"] == 1
    assert math.isfinite(figures["reward_last"])


def test_counters_that_are_zero_are_left_out(finished):
    counters = report_figures(finished)["counters"]
    assert counters["reward/timeouts"] == 1
    assert "reward/errors" not in counters
    assert "updates/skipped" not in counters


def test_a_run_without_steps_or_records_has_figures_of_none(tmp_path):
    writer = RunWriter(tmp_path / "empty", num_steps=0)
    writer.write_config()
    figures = report_figures(tmp_path / "empty")
    assert figures["num_steps"] == 0
    assert figures["stages"] == {}
    for name in (
        "step_time_s",
        "accounted_fraction",
        "tokens_per_s",
        "mfu",
        "accuracy_before",
        "reward_first",
    ):
        assert figures[name] is None


def test_damaged_json_beside_the_records_is_noted_not_fatal(tmp_path):
    run_dir = RunWriter(tmp_path / "damaged", num_steps=2).write_all()
    (run_dir / "summary.json").write_text('{"v": 1, "sta')
    (run_dir / "env.json").unlink()
    assert report_figures(run_dir)["num_steps"] == 2


def test_a_torn_last_line_of_a_killed_run_is_counted(tmp_path):
    run_dir = RunWriter(tmp_path / "torn", num_steps=3).write_all()
    with (run_dir / "ledger" / "rank0.jsonl").open("a") as ledger:
        ledger.write('{"v": 1, "kind": "sec')
    figures = report_figures(run_dir)
    assert figures["num_steps"] == 3
    assert figures["counters"]["records/torn_lines"] == 1


def test_peak_memory_is_the_largest_of_any_stage_and_unknown_where_not_sampled(tmp_path):
    on_cpu = report_figures(RunWriter(tmp_path / "cpu", num_steps=2).write_all())["peak_memory"]
    assert on_cpu["device_allocated"] is None
    assert on_cpu["host_rss"] > 1.1e9
    on_gpu = report_figures(RunWriter(tmp_path / "gpu", num_steps=2, device_name="NVIDIA H200").write_all())
    assert 0 < on_gpu["peak_memory"]["device_allocated"] <= on_gpu["peak_memory"]["device_reserved"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_is_no_run_is_refused(tmp_path, exists):
    folder = tmp_path / "nothing"
    if exists:
        folder.mkdir()
    with pytest.raises(FileNotFoundError, match="nothing"):
        report_figures(folder)


def test_wilson_intervals_are_the_published_ones():
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson_interval(0.5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)
    # Newcombe 1998, example (a) of method 10: 48/80 against 56/70
    assert difference_interval(48 / 80, 80, 56 / 70, 70) == pytest.approx((0.0524, 0.3339), abs=1e-4)


@pytest.mark.parametrize(("share", "num_trials"), [(0.5, 0), (1.5, 10), (-0.1, 10)])
def test_what_is_no_proportion_has_no_interval(share, num_trials):
    with pytest.raises(ValueError, match="no proportion"):
        wilson_interval(share, num_trials)
