"""Every text of the page is there in both languages, is used, and says the same values."""

import ast
import re
from pathlib import Path
from string import Formatter

import pytest
from report_runs import RunWriter

import paceline.report
from paceline.diagnosis.wording import texts
from paceline.report import write_report
from paceline.report.charts_learning import SMALL_CHARTS
from paceline.report.counters import FAULTS, LOSSES, SOURCE_FAULTS, SOURCE_LOSSES
from paceline.report.words import Words
from paceline.report.words.lookup import TEXTS
from paceline.report.words.texts_metrics import CHINESE
from paceline.telemetry.metrics import METRICS
from paceline.types import CAUSES, STAGES

PACKAGE = Path(paceline.report.__file__).parent
HAN = re.compile("[\u4e00-\u9fff]")
SAME_IN_BOTH = re.compile(r"^[A-Za-z0-9 /%{}.,·:_：，（）°→-]*$")
"""Names, units and numbers, which Chinese engineers write as English ones do."""


def places(text):
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("key", TEXTS)
def test_both_languages_have_the_text_and_the_same_values(key):
    english, chinese = TEXTS[key]
    assert english and chinese
    assert places(english) == places(chinese)
    assert HAN.search(chinese) or SAME_IN_BOTH.match(chinese), chinese
    assert not HAN.search(english)


def literals():
    """String constants of the package's sources, and the fixed beginnings of those put together."""
    whole, beginnings = set(), set()
    for path in (*PACKAGE.glob("*.py"), PACKAGE / "words" / "lookup.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                beginnings.add(node.values[0].value)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                whole.add(node.value)
    for path in (PACKAGE / "templates").glob("*.j2"):
        whole |= set(re.findall(r"words\('([^']+)'", path.read_text(encoding="utf-8")))
    return whole, {beginning for beginning in beginnings if "." in beginning}


def test_every_text_is_used():
    whole, beginnings = literals()
    computed = {"count."}  # Words.number_of
    unused = [
        key
        for key in TEXTS
        if key not in whole and not any(key.startswith(start) for start in beginnings | computed)
    ]
    assert unused == []


def test_every_text_that_is_asked_for_exists():
    asked = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_call = (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "words"
            )
            if is_call and isinstance(node.args[0], ast.Constant):
                asked.add(node.args[0].value)
    for path in (PACKAGE / "templates").glob("*.j2"):
        asked |= set(re.findall(r"words\('([^']+)'", path.read_text(encoding="utf-8")))
    assert asked and asked <= set(TEXTS)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_stages_causes_and_meanings_have_names(lang):
    words = Words(lang)
    for stage in (*STAGES, "setup", "unaccounted"):
        assert words.stage(stage) == texts(lang)["stages"][stage]
        assert words.meaning(stage)
    assert all(words.cause(cause) for cause in CAUSES)


def test_a_stage_or_a_status_of_a_later_version_keeps_its_name():
    assert Words("zh").stage("teleport") == "teleport"
    assert Words("zh").meaning("teleport") == ""
    assert (Words("zh").status("died"), Words("zh").status("asleep")) == ("未正常结束即停止", "asleep")


def test_every_metric_that_the_page_explains_is_explained_in_chinese():
    drawn = {spec.lines[0][0] for spec in SMALL_CHARTS}
    of_sources = {f"reward/<source>/{kind}" for kind in (*SOURCE_FAULTS, *SOURCE_LOSSES)}
    assert drawn | set(FAULTS) | set(LOSSES) | of_sources <= set(CHINESE)
    assert set(CHINESE) <= set(METRICS)
    assert all(HAN.search(text) for text in CHINESE.values())


def test_small_charts_have_titles_labels_and_units():
    for spec in SMALL_CHARTS:
        assert f"small.{spec.key}" in TEXTS
        assert all(f"line.{label}" in TEXTS for _, label in spec.lines)
        assert not spec.unit or f"axis.{spec.unit}" in TEXTS


def test_a_chinese_page_has_no_english_heading_left(tmp_path):
    run_dir = RunWriter(tmp_path / "zh", num_steps=5).write_all()
    html = write_report(run_dir, "zh").read_text(encoding="utf-8")
    assert '<html lang="zh-CN">' in html
    titles = re.findall(r"<h[23]>([^<]+)<", html) + re.findall(r"<summary>([^<]+)<", html)
    titles += re.findall(r"<th[^>]*>([^<]+)</th>", html)
    names = {"Tokens/s", "token/s", "FLOP", "TFLOP/s", "MFU"}
    assert len(titles) > 30
    assert [title for title in titles if not HAN.search(title) and title.strip() not in names] == []
