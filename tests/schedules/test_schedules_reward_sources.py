"""Runs whose reward has several sources: what is trained on, recorded and said when one of them fails."""

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_reward_model import write_tiny_reward_model
from tiny_runs import tiny_sections, write_tiny_model

from paceline.config import ConfigError, load_config
from paceline.schedules import run_training
from paceline.telemetry.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))
from scoring_server import lengths, serving


@pytest.fixture(autouse=True)
def _importable_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "model"))


def trained(tmp_path: Path, sources: dict[str, Any], **changes: dict[str, Any]) -> tuple[Path, str]:
    """The run's folder and what its display said."""
    sections = tiny_sections(tmp_path, reward={"sources": sources}, **changes)
    sections["run"]["num_steps"] = 2
    shown = io.StringIO()
    result = run_training(load_config(sections=sections), Console(file=shown, width=200))
    assert result.summary["status"] == "completed"
    return result.run_dir, shown.getvalue()


def figures_of(folder: Path, step: int = 1) -> Mapping[str, float]:
    return next(record.metrics for record in read_metrics(folder) if record.step == step)


def samples(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"samples/step{step}.jsonl").read_text().splitlines()]


def test_a_rule_and_a_service_make_one_reward_with_a_column_each(tmp_path: Path) -> None:
    with serving() as service:
        folder, _ = trained(
            tmp_path,
            {
                "even": {"kind": "rule", "weight": 2.0},
                "long": {"kind": "remote", "url": service.url, "weight": -0.01, "batch_size": 5},
            },
        )
    for row in samples(folder):
        even, long = row["sources"]["even"]["score"], row["sources"]["long"]["score"]
        assert long == len(row["completion"]) and row["score"] == pytest.approx(2.0 * even - 0.01 * long)
    figures = figures_of(folder)
    rows = samples(folder)
    mean = sum(row["sources"]["long"]["score"] for row in rows) / len(rows)
    assert figures["reward/long/mean"] == pytest.approx(mean)
    assert figures["reward/long/errors"] == 0 and figures["reward/long/requests"] >= 4
    assert figures["reward/even/workers_replaced"] == 0
    assert service.requests[0]["samples"][0]["messages"][-1]["role"] == "user"


def test_a_service_alone_is_named_as_task_reward(tmp_path: Path) -> None:
    with serving() as service:
        folder, _ = trained(tmp_path, {}, task={"reward": service.url})
    assert all(row["sources"]["remote"]["score"] == row["score"] for row in samples(folder))


def test_an_outage_is_no_score_and_an_alarm_and_its_samples_are_left_out(tmp_path: Path) -> None:
    answered = {"all": True}

    def fails_for_some(body: dict[str, Any]) -> tuple[int, Any]:
        if answered["all"]:
            return lengths(body)
        return 404, {"detail": "sandbox is down"}

    sections = {"even": {"kind": "rule"}, "sandbox": {"kind": "remote", "weight": 1.0, "batch_size": 64}}
    with serving(fails_for_some) as service:
        sections["sandbox"]["url"] = service.url
        answered["all"] = False
        with pytest.raises(Exception, match="without a single optimiser update"):
            trained(tmp_path, sections)
    folder = tmp_path / "runs" / "r"
    for row in samples(folder):
        assert (row["outcome"], row["score"], row["reward"], row["advantage"]) == ("error", None, None, 0.0)
        assert row["sources"]["even"]["outcome"] == "score" and "404" in row["message"]
    figures = figures_of(folder)
    assert figures["samples/without_verdict"] == figures["reward/sandbox/errors"] == 16
    assert figures["tokens/loss"] == 0 and "reward/sandbox/mean" not in figures


def test_an_optional_service_that_is_down_leaves_the_rule_and_says_so(tmp_path: Path) -> None:
    with serving(lambda body: (404, "down")) as service:
        folder, shown = trained(
            tmp_path,
            {"even": {"kind": "rule"}, "extra": {"kind": "remote", "url": service.url, "optional": True}},
        )
    assert all(row["score"] == row["sources"]["even"]["score"] for row in samples(folder))
    assert "ALARM: reward source extra" in shown and "status 404" in shown
    assert figures_of(folder)["reward/extra/left_out"] == 0


def test_a_reward_model_and_a_judge_score_what_a_rule_scores_too(tmp_path: Path) -> None:
    write_tiny_reward_model(tmp_path / "rated")
    write_tiny_model(tmp_path / "judge", "qwen3")
    (tmp_path / "ask.jinja").write_text("{{ question }} {{ completion }}")
    judge = {
        "kind": "judge",
        "path": str(tmp_path / "judge"),
        "template": str(tmp_path / "ask.jinja"),
        "score_pattern": r"w(\d+)",
        "max_new_tokens": 4,
        "weight": 0.01,
        "optional": True,
    }
    rated = {"kind": "model", "path": str(tmp_path / "rated"), "weight": 0.5, "host_between_uses": True}
    folder, shown = trained(tmp_path, {"even": {"kind": "rule"}, "rated": rated, "judge": judge})
    for row in samples(folder):
        parts = {name: part["score"] for name, part in row["sources"].items()}
        assert None not in parts.values()
        assert row["score"] == pytest.approx(parts["even"] + 0.5 * parts["rated"] + 0.01 * parts["judge"])
    figures = figures_of(folder)
    assert figures["reward/rated/errors"] == figures["reward/judge/unparseable"] == 0
    assert figures["reward/judge/verdict_tokens"] > 0 and figures["tflops/reward"] > 0
    assert "constant answer: not measured" in shown


def test_a_reward_model_that_cannot_be_loaded_is_refused_by_its_sources_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trained(
            tmp_path,
            {"even": {"kind": "rule"}, "rated": {"kind": "model", "path": str(tmp_path / "nowhere")}},
        )
    assert caught.value.key == "reward.sources.rated.path"
