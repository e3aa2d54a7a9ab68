"""The page: one file that asks no server for anything, shows the figures, and runs nothing that a model wrote."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from report_runs import RunWriter

from paceline.report import report_figures, write_report
from paceline.report.charts_learning import SMALL_CHARTS
from paceline.report.counters import FAULTS, LOSSES
from paceline.report.palette import STAGE_COLOURS, dark_by_light
from paceline.report.sentences import summary_sentences
from paceline.report.words import Words
from paceline.telemetry.metrics import METRICS
from paceline.types import STAGES

ATTACK = "<script>alert('x')</script><img src=http://example.com/x.png>"


class Page(HTMLParser):
    """Elements with their attributes, scripts' contents, and the text that a reader sees."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.scripts, self.text = [], [], ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            attrs, content = self.scripts[-1]
            self.scripts[-1] = (attrs, content + data)
        elif self._inside != "style":
            self.text += data.replace("\u202f", " ")

    def script(self, element_id):
        return next(content for attrs, content in self.scripts if attrs.get("id") == element_id)

    @property
    def charts(self):
        return {chart["key"]: chart for chart in json.loads(self.script("chart-data"))}

    @property
    def chart_places(self):
        ids = (attrs.get("id") or "" for _, attrs in self.elements)
        return {name.removeprefix("chart-") for name in ids if name.startswith("chart-")} - {"data"}


def page_of(run_dir):
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    writer = RunWriter(tmp_path_factory.mktemp("runs") / "shown", num_steps=14, completions={0: ATTACK})
    return writer.write_all()


@pytest.fixture(scope="module")
def page(run_dir):
    return page_of(run_dir)


def test_the_report_lies_in_the_runs_folder_and_replaces_an_earlier_one(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    assert write_report(run_dir) == path
    assert not list(run_dir.glob("*.tmp"))


def test_no_element_asks_the_network_for_anything(page):
    assert not {"link", "iframe", "img", "object", "embed", "base", "form"} & {
        tag for tag, _ in page.elements
    }
    for _, attrs in page.elements:
        assert not {"src", "srcset", "action", "onclick", "onload"} & set(attrs)
        assert attrs.get("href", "#").startswith("#")


def test_the_page_forbids_requests_and_every_script_but_its_own(page):
    policy = next(
        a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy and "connect-src" not in policy
    executable = [content for attrs, content in page.scripts if "type" not in attrs]
    assert len(executable) == 1
    unpacked = gzip.decompress(base64.b64decode(page.script("plotly"))).decode()
    for content in (*executable, unpacked):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_a_completion_with_markup_is_shown_as_text(page):
    assert ATTACK in page.text
    assert len(page.scripts) == 4


def test_markup_in_names_messages_and_spans_is_text_too(tmp_path):
    run_dir = RunWriter(tmp_path / "marked", num_steps=2).write_all()
    for path in (run_dir / "config.yaml", run_dir / "ledger" / "rank0.jsonl"):
        text = path.read_text()
        text = text.replace("name: word_sequence_reversal", 'name: "</script><b>task"')
        path.write_text(text.replace('"name": "optimiser"', '"name": "</script><b>span"'))
    summary = json.loads((run_dir / "summary.json").read_text())
    summary |= {"status": "failed", "message": "ValueError: <b>boom</b>"}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    page = page_of(run_dir)
    assert len(page.scripts) == 4
    assert "</script><b>task" in page.text
    assert "<b>boom</b>" in page.text
    assert "</script><b>span" in json.dumps(page.charts["step-timeline"])


def test_every_chart_has_its_place_and_every_place_its_chart(page):
    assert set(page.charts) == page.chart_places
    assert {"breakdown", "step-timeline", "run-timeline", "reward", "accuracy", "memory-stages"} <= set(
        page.charts
    )


def test_every_colour_of_a_chart_has_a_dark_version(page):
    used = set(re.findall(r"#[0-9a-fA-F]{6}\b", page.script("chart-data")))
    known = json.loads(page.script("dark-colours"))
    assert used <= set(known)
    assert known == dark_by_light()


def test_no_two_stages_share_a_colour():
    assert len({colour.light for colour in STAGE_COLOURS.values()}) == len(STAGE_COLOURS)
    assert len({colour.dark for colour in STAGE_COLOURS.values()}) == len(STAGE_COLOURS)
    assert set(STAGES) <= set(STAGE_COLOURS)


def test_headline_figures_are_on_the_page(page):
    for text in (
        "18.0 % → 47.7 %",
        "best constant answer 1.6 %",
        "of the steps' wall time",
        "hardware without a known",
    ):
        assert text in page.text
    for stage in ("rollout", "reward", "actor update", "unaccounted"):
        assert stage in page.text


def test_charts_hold_the_values_of_the_records(run_dir, page):
    figures = report_figures(run_dir)
    traces = {trace["name"]: trace for trace in page.charts["breakdown"]["figure"]["data"]}
    mean_rollout = sum(traces["rollout"]["y"][1:]) / 13  # the first step is warm-up
    assert mean_rollout == pytest.approx(figures["stages"]["rollout"])
    assert traces["unaccounted"]["y"] == pytest.approx([0.006] * 14)
    held_out = page.charts["accuracy"]["figure"]["data"][-1]
    assert held_out["x"] == [0, 14] and held_out["y"] == [23 / 128, 61 / 128]


def test_every_metric_the_report_looks_for_is_declared():
    drawn = {name for chart in SMALL_CHARTS for name, _ in chart.lines}
    assert drawn | set(FAULTS) | set(LOSSES) <= set(METRICS)


def test_what_was_lost_is_listed_and_what_was_not_is_not(page):
    assert "reward/timeouts" in page.text
    assert "updates/skipped" not in page.text


def test_metrics_that_never_moved_are_said_in_a_line_instead_of_drawn(page):
    assert "metric-clip" not in page.charts
    assert "clip_fraction" in page.text


def test_samples_of_the_first_and_last_step_are_shown_without_their_shared_beginning(page):
    assert "Step 1" in page.text and "Step 14" in page.text
    assert page.text.count("river stone") == 1
    assert "mean reward" in page.text


def test_a_running_run_without_summary_environment_or_evaluation_has_a_page(tmp_path):
    writer = RunWriter(tmp_path / "going", num_steps=9)
    writer.write_config()
    writer.write_process(range(1, 4), evaluates=False)
    page = page_of(tmp_path / "going")
    assert "still going or was interrupted; this is the state after 3 steps" in page.text
    assert "summary.json is missing" in page.text and "env.json is missing" in page.text
    assert "accuracy" not in page.charts


def test_a_run_without_a_step_has_a_page(tmp_path):
    writer = RunWriter(tmp_path / "empty", num_steps=0)
    writer.write_config()
    page = page_of(tmp_path / "empty")
    assert "No step was finished" in page.text
    assert page.charts == {}


def test_a_run_of_one_step_has_every_chart_of_time(tmp_path):
    page = page_of(RunWriter(tmp_path / "one", num_steps=1).write_all())
    assert {"breakdown", "step-timeline", "run-timeline"} <= set(page.charts)


def test_several_ranks_are_compared(tmp_path):
    writer = RunWriter(tmp_path / "ranks", num_steps=3, device_name="NVIDIA H200")
    writer.write_all()
    for rank in (1, 2):
        RunWriter(tmp_path / "ranks", num_steps=3, seed=rank).write_process(range(1, 4), rank=rank)
    page = page_of(tmp_path / "ranks")
    assert "Largest actor update time over the mean" in page.text


def test_gaps_stand_where_a_metric_was_not_finite(tmp_path):
    overrides = {3: {"grad_norm": float("nan")}}
    page = page_of(RunWriter(tmp_path / "nan", num_steps=5, metric_overrides=overrides).write_all())
    assert page.charts["metric-grad"]["figure"]["data"][0]["y"][2] is None
    assert "not finite: grad_norm" in page.text


def test_more_steps_than_bars_are_averaged(tmp_path):
    path = write_report(RunWriter(tmp_path / "long", num_steps=200).write_all())
    breakdown = Page(path.read_text(encoding="utf-8")).charts["breakdown"]["figure"]["data"]
    assert len(breakdown[0]["x"]) <= 160


def test_a_change_within_chance_is_not_called_more(tmp_path):
    writer = RunWriter(tmp_path / "chance", num_steps=2, num_prompts=32)
    writer.write_all()
    writer.write_summary("completed", accuracy_before=5 / 32, accuracy_after=8 / 32)
    sentences = " ".join(summary_sentences(report_figures(tmp_path / "chance"), Words("en")))
    assert "can be chance" in sentences
