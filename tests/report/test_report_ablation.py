"""An ablation's page: every arm with its ratio, interval, verdict, prediction and correctness."""

import pytest

from paceline.cli.app import main
from paceline.lab.results import (
    Ablation,
    AblationRow,
    ArmFigures,
    Correctness,
    DifferenceInterval,
    FigureChange,
    Prediction,
    RatioInterval,
    RunEntry,
    StageChange,
    write_ablation,
)
from paceline.report.ablation_page import build_ablation
from paceline.report.words import Words

WORDS = Words("en")


def arm(name, step_s):
    return ArmFigures(name, 5, step_s, {"update_actor": step_s * 0.6}, 4000.0, 0.3, 2e9, 3e9, 0.9, 0.5, 1.1)


def row(name, ratio, verdict, status="passed", reason="within_tolerance", predicted=True):
    difference = DifferenceInterval(10 * (1 - ratio), 10 * (1 - ratio) - 0.3, 10 * (1 - ratio) + 0.3, 0.95)
    stage = StageChange(6.0, 6.0 * ratio, DifferenceInterval(6 * (ratio - 1), -3.0, 0.1, 0.95))
    return AblationRow(
        name=name,
        features=(name,),
        keys={"batch.share_prefixes": "on"},
        num_pairs=5,
        num_failed=0,
        step_time=RatioInterval(ratio, ratio - 0.02, ratio + 0.02, 0.95, 0.001, 0.004),
        verdict=verdict,
        saved_s=difference,
        stages={"update_actor": stage},
        figures={
            "tokens_per_s_per_device": FigureChange(
                4000.0,
                4400.0,
                DifferenceInterval(400.0, 350.0, 450.0, 0.95),
                RatioInterval(1.1, 1.0, 1.2, 0.95, 0.01),
            ),
            "loss": FigureChange(1.1, 1.1, DifferenceInterval(0.0, 0.0, 0.0, 0.95), None),
        },
        predicted=Prediction(2.0, 1.0, 3.0, 0.8, 0.7, 0.9) if predicted else None,
        correctness=Correctness(status, reason, 1e-3, 2e-4, 1e-4, 0.0, True),
        arm=arm(name, 10 * ratio),
    )


@pytest.fixture
def ablation():
    rows = (
        row("share_prefixes", 0.7, "faster"),
        row("no_recompute", 1.0, "no_difference", predicted=False),
        row("mine", 1.2, "slower", "failed", "beyond_tolerance"),
    )
    runs = tuple(
        RunEntry(arm, 0, i, f"runs/{i}", "completed", 61.0) for i, arm in enumerate(("baseline", "mine"))
    )
    return Ablation(
        "demo", "complete", "recipes/demo.yaml", ("run.seed=1",), 0.05, 0.02, 5, 12, 2, (), True, arm("baseline", 10.0),
        rows, runs, {"device": "cpu"},
    )  # fmt: skip


def blocks_of(page, key):
    return next(section for section in page.sections if section.key == key).blocks


def test_every_arm_has_a_row_with_ratio_interval_verdict_and_prediction(ablation):
    page = build_ablation(ablation, WORDS)
    table = blocks_of(page, "result")[1]
    texts = [[cell.text for cell in row.cells] for row in table.rows]
    assert texts[0][:4] == ["baseline", "", "10.0\u202fs", "1"]
    assert texts[1][1:6] == ["faster", "7.00\u202fs", "0.700", "0.680 – 0.720", "0.004"]
    assert texts[1][6:8] == ["3.00\u202fs", "2.00\u202fs"]
    assert texts[2][7] == "–"
    assert texts[3][8] == "differ" and texts[3][6].startswith("−")


def test_the_sentences_name_the_fastest_arm_and_the_one_that_computes_something_else(ablation):
    sentences = build_ablation(ablation, WORDS).sentences
    assert "share_prefixes" in sentences[0] and "0.700" in sentences[0]
    assert sentences[1].endswith("mine.")
    assert "at most 5" in sentences[2]


def test_charts_hold_the_records_intervals(ablation):
    charts = {chart.key: chart for chart in build_ablation(ablation, WORDS).charts}
    assert set(charts) == {"ablation-ratio", "ablation-prediction", "ablation-stages"}
    arms = {trace.y[0]: trace for trace in charts["ablation-ratio"].figure.data}
    assert arms["share_prefixes"].x[0] == 0.7
    assert arms["share_prefixes"].error_x.array[0] == pytest.approx(0.02)
    predicted, measured = charts["ablation-prediction"].figure.data
    assert list(predicted.y) == ["mine", "share_prefixes"]
    assert measured.x[1] == pytest.approx(3.0)


def test_an_ablation_that_has_only_begun_has_a_page(ablation):
    bare = Ablation(
        "demo", "running", "r.yaml", (), 0.05, 0.02, 5, 12, 2, (), False, None, (), ablation.runs[:1], {}
    )
    page = build_ablation(bare, WORDS)
    assert page.status == "not finished"
    assert page.charts == []


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_command_knows_an_ablations_folder(ablation, tmp_path, capsys, lang):
    write_ablation(tmp_path, ablation)
    assert main(["report", str(tmp_path), "--lang", lang]) == 0
    path = capsys.readouterr().out.strip()
    assert path == str(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ("更快" in html) == (lang == "zh")
