"""Many ranks: nothing is lost in the heat map, clocks are respected, and a thousand steps of 64 ranks stay small."""

import base64
import json
import re
import shutil
import time

import numpy as np
import pytest
from report_runs import RunWriter

from many_ranks import SLOW_RANK, write_many_ranks
from paceline.report import write_report
from paceline.report.charts_rank_timeline import one_step, rank_timeline, whole_run
from paceline.report.charts_ranks import utilisation_heatmap
from paceline.report.run_data import load_run
from paceline.report.words import Words

WORDS = Words("en")


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Fourteen ranks, twelve steps."""
    return load_run(write_many_ranks(tmp_path_factory.mktemp("few") / "run", SLOW_RANK + 1, 12))


def shown_charts(html):
    """The page's charts by key, arrays unpacked."""
    text = re.search(r'id="chart-data">(.*?)</script>', html, re.S).group(1)
    return {chart["key"]: chart for chart in json.loads(text)}


def unpacked(array):
    """A Plotly array, packed or not."""
    if not isinstance(array, dict):
        return np.array(array)
    values = np.frombuffer(base64.b64decode(array["bdata"]), dtype=array["dtype"])
    shape = array.get("shape")
    return values.reshape([int(size) for size in shape.split(",")]) if shape else values


def test_the_heat_map_holds_every_rank_and_the_values_of_its_steps(few):
    chart = utilisation_heatmap(few.rank_steps, WORDS)
    labels = [variant.label for variant in chart.variants]
    assert labels == ["busy", "waiting", "actor update", "rollout", "tokens trained on", "peak memory"]
    update = chart.variants[labels.index("actor update")].figure.data[0].z
    assert update.shape == (SLOW_RANK + 1, 12)
    steps = few.rank_steps[SLOW_RANK]
    assert update[SLOW_RANK] == pytest.approx(
        [step.stages["update_actor"].self_s for step in steps], rel=1e-6
    )
    busy = chart.figure.data[0].z[SLOW_RANK, 3]
    idle = steps[3].stages["idle"].self_s + steps[3].unaccounted_s
    assert busy == pytest.approx(1 - idle / steps[3].wall_s, rel=1e-6)


def test_more_steps_than_columns_are_averaged_and_ranks_never(few):
    steps = few.rank_steps[0]
    many = dict.fromkeys(range(300), steps * 1)
    assert utilisation_heatmap(many, WORDS).figure.data[0].z.shape == (300, 12)


def test_one_rank_needs_no_heat_map(few):
    assert utilisation_heatmap({0: few.rank_steps[0]}, WORDS) is None


def test_a_step_is_drawn_for_every_rank_without_losing_time(few):
    found = one_step(few, 5)
    assert [rank.rank for rank in found] == list(range(SLOW_RANK + 1))
    for rank in found:
        step = few.rank_steps[rank.rank][4]
        assert sum(bar.busy_s for bar in rank.bars) == pytest.approx(step.wall_s, rel=1e-3)


def test_ranks_whose_clocks_differ_are_laid_against_each_other(tmp_path):
    run_dir = write_many_ranks(tmp_path / "run", 2, 2)
    path = run_dir / "ledger" / "rank1.jsonl"
    path.write_text(path.read_text().replace('"unix_s": 1795963813.25', '"unix_s": 1795963815.25'))
    first, second = one_step(load_run(run_dir), 1)
    assert first.bars[0].start_s == pytest.approx(0.0, abs=1e-6)
    assert second.bars[0].start_s == pytest.approx(2.0, abs=1e-6)


def test_a_run_that_fits_is_drawn_from_end_to_end(few):
    chart = rank_timeline(few, WORDS)
    assert chart.variants[0].label == "whole run"
    steps = {variant.label.split(":")[0] for variant in chart.variants[1:]}
    assert {"step 1", "step 12"} <= steps
    end = max(bar.end_s for rank in whole_run(few.ledgers) for bar in rank.bars)
    assert end == pytest.approx(few.steps[-1].end_s, abs=0.05)


def test_one_rank_has_its_timeline_too(tmp_path):
    run = load_run(RunWriter(tmp_path / "one", num_steps=3).write_all())
    chart = rank_timeline(run, WORDS)
    shown = {trace.name for trace in chart.figure.data}
    assert {"set-up", "rollout", "actor update", "checkpoint"} <= shown


def test_a_thousand_steps_of_64_ranks_are_one_small_page(tmp_path):
    run_dir = write_many_ranks(tmp_path / "run", 64, 1000)
    began = time.monotonic()
    path = write_report(run_dir)
    seconds = time.monotonic() - began
    html = path.read_text(encoding="utf-8")
    shutil.rmtree(run_dir)  # 270 MB that pytest would keep
    charts = shown_charts(html)
    assert unpacked(charts["utilisation"]["figure"]["data"][0]["z"]).shape == (64, 200)
    assert {"breakdown", "rank-timeline", "efficiency", "rank-tokens"} <= set(charts)
    assert len(html.encode()) < 15e6
    assert seconds < 240  # ten on a machine that does nothing else
