"""Metrics obey their declared reduction under any split, and their log survives kills and resumes."""

import ast
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.telemetry.metric_schema import MODEL_STAGES
from paceline.telemetry.metrics import (
    METRICS,
    MetricAccumulator,
    MetricLog,
    UnknownMetricError,
    read_metric_history,
    read_metrics,
    spec_of,
)
from paceline.types import STAGES

SOURCE = Path(paceline.__file__).parent
OBSERVATIONS = st.lists(
    st.tuples(
        st.floats(-1e6, 1e6),
        st.floats(0, 1e5).filter(lambda weight: weight == 0 or weight > 1e-3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=40,
)


def collected(observations, name):
    accumulator = MetricAccumulator()
    for value, weight in observations:
        accumulator.add(name, value, weight)
    return accumulator


@pytest.mark.parametrize("name", ["loss/total", "entropy", "ratio/max", "response_length/min"])
@given(observations=OBSERVATIONS)
def test_any_split_into_micro_batches_and_ranks_gives_the_same_bits(name, observations):
    whole = collected([(value, weight) for value, weight, _ in observations], name).reduce()
    parts = [collected([(v, w) for v, w, part in observations if part == i], name) for i in range(4)]
    merged = MetricAccumulator()
    for part in reversed(parts):
        merged.merge(part)
    assert merged.reduce() == whole


@given(observations=OBSERVATIONS)
def test_a_mean_is_weighted_by_what_it_is_a_mean_of(observations):
    total = math.fsum(weight for _, weight, _ in observations)
    reduced = collected([(value, weight) for value, weight, _ in observations], "entropy").reduce()
    if total == 0:
        assert reduced == {}
    else:
        expected = math.fsum(value * weight for value, weight, _ in observations) / total
        assert reduced["entropy"] == pytest.approx(expected, rel=1e-12, abs=1e-9)


def test_a_short_micro_batch_does_not_count_as_much_as_a_long_one():
    assert collected([(1.0, 300), (5.0, 100)], "entropy").reduce() == {"entropy": 2.0}


def test_partial_sums_over_one_denominator_add_up_whatever_their_weight():
    assert collected([(0.25, 300), (0.5, 0)], "loss/total").reduce() == {"loss/total": 0.75}


def test_the_last_value_is_the_latest_merged():
    first, second = collected([(1e-5, 1)], "lr"), collected([(2e-5, 1)], "lr")
    first.merge(second)
    assert first.reduce() == {"lr": 2e-5}


def test_merging_leaves_the_other_accumulator_as_it_was():
    first, second = MetricAccumulator(), collected([(3.0, 1)], "ratio/max")
    first.merge(second)
    first.add("ratio/max", 9.0)
    assert second.reduce() == {"ratio/max": 3.0}


@pytest.mark.parametrize("name", ["loss/total", "entropy", "ratio/max", "response_length/min"])
@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_is_never_hidden_by_a_reduction(name, order):
    assert math.isnan(collected([(value, 1.0) for value in order], name).reduce()[name])


def test_infinities_of_both_signs_sum_to_nan_and_not_to_an_error():
    assert math.isnan(collected([(math.inf, 1), (-math.inf, 1)], "loss/total").reduce()["loss/total"])
    assert collected([(1e308, 1)] * 3, "loss/total").reduce() == {"loss/total": math.inf}


@pytest.mark.parametrize("name", ["entropy", "ratio/max", "lr"])
def test_nothing_observed_is_absent_and_neither_zero_nor_nan(name):
    assert collected([(math.nan, 0.0)], name).reduce() == {}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_cannot_be_a_count_is_refused(weight):
    with pytest.raises(ValueError, match="weight"):
        MetricAccumulator().add("entropy", 1.0, weight)


@pytest.mark.parametrize("wrong,nearest", [("rewrd/mean", "reward/mean"), ("grad_nrom", "grad_norm")])
def test_an_undeclared_name_is_refused_with_the_nearest_declared_one(tmp_path, wrong, nearest):
    for refuse in (
        lambda: MetricAccumulator().add(wrong, 1.0),
        lambda: MetricLog(tmp_path).record(1, {wrong: 1.0}),
    ):
        with pytest.raises(UnknownMetricError, match=f"{wrong}.*nearest: '{nearest}'"):
            refuse()
    assert read_metrics(tmp_path) == []


def test_every_stage_has_a_time():
    assert all(spec_of(f"time/{stage}").unit == "s" for stage in STAGES)


def test_every_stage_that_runs_a_model_has_an_mfu():
    assert all(spec_of(f"mfu/{stage}").unit == "share" for stage in MODEL_STAGES)


def test_every_declaration_says_what_it_means():
    for spec in METRICS.values():
        assert spec.unit and len(spec.description.split()) >= 2 and spec.description.endswith(".")


def metric_names_in(folder):
    """Strings in the source that have the form of a metric and the prefix of one."""
    prefixes = {name.split("/")[0] for name in METRICS if "/" in name}
    for path in sorted((SOURCE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = re.fullmatch(r"([a-z_]+)/[a-z_]+", node.value)
                if match and match[1] in prefixes:
                    yield path, node.value


@pytest.mark.parametrize("folder", ["algorithms", "engine", "schedules", "rollout", "report"])
def test_every_metric_the_package_names_is_declared(folder):
    known = {*METRICS, *(spec.unit for spec in METRICS.values())}
    assert [(path.name, name) for path, name in metric_names_in(folder) if name not in known] == []


@pytest.fixture
def log(tmp_path):
    with MetricLog(tmp_path) as opened:
        yield opened


def test_what_is_recorded_is_read_back_in_order_of_steps(tmp_path, log):
    log.record(0, {"eval/accuracy": 0.25})
    log.record(1, {"reward/mean": 0.1, "lr": 1e-6})
    assert [(record.step, dict(record.metrics)) for record in read_metrics(tmp_path)] == [
        (0, {"eval/accuracy": 0.25}),
        (1, {"reward/mean": 0.1, "lr": 1e-6}),
    ]


def test_values_json_cannot_hold_are_strings_in_the_file_and_numbers_when_read(tmp_path, log):
    log.record(1, {"grad_norm": math.nan, "ratio/max": math.inf, "reward/max": -math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["metrics"] == {"grad_norm": "nan", "ratio/max": "inf", "reward/max": "-inf"}
    metrics = read_metrics(tmp_path)[0].metrics
    assert math.isnan(metrics["grad_norm"])
    assert (metrics["ratio/max"], metrics["reward/max"]) == (math.inf, -math.inf)


def test_a_record_is_in_the_file_before_record_returns(tmp_path, log):
    log.record(1, {"lr": 1.0})
    assert len(read_metrics(tmp_path)) == 1


def test_a_killed_process_loses_no_recorded_step(tmp_path):
    program = (
        "import os, signal, sys, pathlib\n"
        "from paceline.telemetry.metrics import MetricLog\n"
        "log = MetricLog(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1, 6): log.record(step, {'lr': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert [record.step for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_resumed_run_appends_and_its_records_replace_those_of_the_same_steps(tmp_path):
    with MetricLog(tmp_path) as first:
        for step in (1, 2, 3):
            first.record(step, {"lr": step})
    with MetricLog(tmp_path) as resumed:
        for step in (2, 3, 4):
            resumed.record(step, {"lr": 10 * step})
    history = read_metric_history(tmp_path)
    assert [record.metrics["lr"] for record in history.records] == [1, 20, 30, 40]
    assert history.num_replaced == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_steps_beyond_the_point_of_a_resume_are_gone_also_when_the_resumed_run_is_killed_early(tmp_path):
    for steps in (range(1, 10), range(7, 8)):  # reached 9, resumed after 6, killed after 7
        with MetricLog(tmp_path) as log:
            for step in steps:
                log.record(step, {"lr": step})
    history = read_metric_history(tmp_path)
    assert [record.step for record in history.records] == [1, 2, 3, 4, 5, 6, 7]
    assert history.num_replaced == 3


def test_one_process_records_a_step_once(log):
    log.record(3, {"lr": 1.0})
    with pytest.raises(ValueError, match="step 3"):
        log.record(3, {"lr": 2.0})


def test_a_line_torn_at_any_byte_is_counted_and_spoils_no_other(tmp_path):
    with MetricLog(tmp_path) as log:
        log.record(1, {"reward/mean": 0.5})
        log.record(2, {"reward/mean": 0.75})
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for length in random.Random(0).sample(range(first + 1, len(content) - 1), 20):
        path.write_bytes(content[:length])
        torn = read_metric_history(tmp_path)
        assert ([record.step for record in torn.records], torn.num_torn_lines) == ([1], 1)
        with MetricLog(tmp_path) as resumed:
            resumed.record(2, {"reward/mean": 1.0})
        again = read_metric_history(tmp_path)
        assert [record.metrics["reward/mean"] for record in again.records] == [0.5, 1.0]
        assert again.num_torn_lines == 1


def test_a_whole_line_without_its_newline_is_not_torn(tmp_path):
    with MetricLog(tmp_path) as log:
        log.record(1, {"lr": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip())
    with MetricLog(tmp_path) as log:
        log.record(2, {"lr": 2.0})
    history = read_metric_history(tmp_path)
    assert ([record.step for record in history.records], history.num_torn_lines) == ([1, 2], 0)


def test_zeros_left_by_a_power_cut_are_a_torn_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\0" * 100)
    assert read_metric_history(tmp_path).num_torn_lines == 1


def test_a_record_of_another_version_is_refused_with_both_versions(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"v": 7, "step": 1, "time": 0, "metrics": {}}\n')
    with pytest.raises(ValueError, match=r"version 7.*version 1"):
        read_metrics(tmp_path)


def test_a_run_without_metrics_has_none(tmp_path):
    assert read_metric_history(tmp_path).records == ()
