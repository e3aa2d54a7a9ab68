"""A judge is asked by a template, writes on the native engine, and what it writes is a score or an error."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_reward_model import conversations, job
from tiny_runs import write_tiny_model

from paceline.config import ConfigError
from paceline.config.reward_schema import JudgeSource
from paceline.config.schema import ModelSection
from paceline.model.loading import load_model, load_tokenizer
from paceline.reward_models.judge import JudgeScorer, JudgeSettings
from paceline.reward_models.judge_text import JudgeTemplate, ScoreReader
from paceline.rollout import NativeEngine
from paceline.rollout.native.engine import EngineLimits
from paceline.telemetry.ledger import Ledger
from paceline.types import RewardJob, Verdict


def reader(**settings: Any) -> ScoreReader:
    return ScoreReader.of(JudgeSource(kind="judge", path="m", **settings))


def scorer(tmp_path: Path, temperature: float = 0.0, seed: int = 0, **settings: Any) -> JudgeScorer:
    """A tiny judge whose words are w0 to w93; its score is the number of the last word."""
    if not (tmp_path / "judge").exists():
        write_tiny_model(tmp_path / "judge")
    (tmp_path / "ask.jinja").write_text("{{ question }} w7 {{ completion }}")
    section = ModelSection(path=str(tmp_path / "judge"))
    model, tokenizer, ledger = load_model(section, torch.device("cpu")), load_tokenizer(section), Ledger()
    return JudgeScorer(
        model,
        tokenizer,
        NativeEngine(model, tokenizer, EngineLimits(4, 256), ledger),
        ledger,
        JudgeTemplate(str(tmp_path / "ask.jinja"), "k"),
        reader(**{"template": "ask.jinja", "score_pattern": r"w(\d+)", **settings}),
        JudgeSettings(temperature, 5, seed),
    )


def verdicts(judge: JudgeScorer, jobs: list[RewardJob]) -> list[Verdict]:
    pending = [judge.submit(one) for one in jobs]
    judge.flush()
    return [handle.result(0) for handle in pending]


def test_a_greedy_judge_scores_alike_whatever_it_is_asked_together_with(tmp_path: Path) -> None:
    judge = scorer(tmp_path)
    together = [verdict.score for verdict in verdicts(judge, conversations())]
    assert [verdicts(judge, [one])[0].score for one in conversations()] == together
    assert None not in together and len(set(together)) > 1
    assert judge.take_counts()["verdict_tokens"] > 0


def test_a_sampling_judge_draws_from_its_seed_and_the_request_alone(tmp_path: Path) -> None:
    first = [verdict.message or verdict.score for verdict in verdicts(scorer(tmp_path, 1.0), conversations())]
    again = verdicts(scorer(tmp_path, 1.0), conversations()[::-1])[::-1]
    assert [verdict.message or verdict.score for verdict in again] == first
    other = verdicts(scorer(tmp_path, 1.0, seed=1), conversations())
    assert [verdict.message or verdict.score for verdict in other] != first


def test_a_verdict_without_a_score_is_an_error_and_is_counted(tmp_path: Path) -> None:
    judge = scorer(tmp_path, score_pattern=r"Score: (\d+)")
    found = verdicts(judge, conversations())
    assert {(verdict.outcome, verdict.score) for verdict in found} == {("error", None)}
    assert "Score" in found[0].message and judge.take_counts()["unparseable"] == 6


def test_a_request_that_is_too_long_is_an_error_and_is_not_cut_off(tmp_path: Path) -> None:
    judge = scorer(tmp_path)
    found = verdicts(judge, [job("w1", "w2"), job("w1", "w2 " * 200)])
    assert [verdict.outcome for verdict in found] == ["score", "error"]
    assert judge.take_counts()["overlong"] == 1


def test_judging_is_time_and_work_of_the_reward_stage(tmp_path: Path) -> None:
    judge = scorer(tmp_path)
    with judge._ledger.step(1):
        verdicts(judge, conversations())
    section = judge._ledger.last_section
    assert section is not None and "rollout" not in section.stage_s
    assert section.stage_flops["reward"] > 0 and section.stage_tokens["reward"] > 0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Good. Score: 7", 7.0),
        ("Score: 1 at first sight. Then\nScore: 2.5", 2.5),
        ("**Score: 10**", 10.0),
        ("Score: **3**", 3.0),
        ("Score: 11", None),
        ("Score: -1", None),
        ("Score: ten", None),
        ("", None),
    ],
)
def test_the_last_score_line_counts_within_its_bounds(text: str, score: float | None) -> None:
    found, message = reader().read(text)
    assert found == score and bool(message) == (score is None)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 0.5}', 0.5),
        ('I think {"score": 1} but no: {"why": {"a": 1}, "score": 0.25} done', 0.25),
        ('```json\n{"score": "0.75"}\n```', 0.75),
        ('{"score": true}', None),
        ('{"score": null}', None),
        ('{"score": NaN}', None),
        ('{"score": [1]}', None),
        ('{"scores": 1}', None),
        ('{"score": 1', None),
        ("{{{", None),
    ],
)
def test_the_last_json_object_with_the_key_counts(text: str, score: float | None) -> None:
    assert reader(score_key="score", lowest=0, highest=1).read(text)[0] == score


def test_a_pattern_that_captures_no_number_is_no_score() -> None:
    found = reader(template="t", score_pattern=r"verdict (\w+)")
    assert found.read("verdict yes")[0] is None and found.read("verdict 1")[0] == 1.0
    assert found.lowest == -math.inf  # bounds are the default template's, not another one's
    assert re.compile("x").groups == 0


def test_the_default_template_asks_with_and_without_a_reference(tmp_path: Path) -> None:
    template = JudgeTemplate(None, "k")
    text = template.render(
        RewardJob("rendered", "my answer", "42", {}, ({"role": "user", "content": "why?"},))
    )
    assert (
        "why?" in text and "my answer" in text and "Reference answer:\n42" in text and "rendered" not in text
    )
    assert "Reference" not in template.render(RewardJob("q", "c"))


@pytest.mark.parametrize(
    ("text", "rule"),
    [("{{ question", "not a Jinja template"), ("{{ quetsion }}", "quetsion"), (None, "readable")],
)
def test_a_template_that_cannot_be_rendered_is_refused_before_a_rollout(
    tmp_path: Path, text: str | None, rule: str
) -> None:
    path = tmp_path / "t.jinja"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rule) as caught:
        JudgeTemplate(str(path), "reward.sources.j.template")
    assert caught.value.key == "reward.sources.j.template"


def test_a_field_that_one_sample_lacks_is_its_error(tmp_path: Path) -> None:
    judge = scorer(tmp_path)
    (tmp_path / "t.jinja").write_text("{{ metadata.rubric }} {{ completion }}")
    judge._template = JudgeTemplate(str(tmp_path / "t.jinja"), "k")
    found = verdicts(judge, [RewardJob("q", "w1", None, {"rubric": "w2"}), RewardJob("q", "w1")])
    assert [verdict.outcome for verdict in found] == ["score", "error"] and "rubric" in found[1].message


def test_a_template_reaches_no_further_than_its_variables(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ question.__class__.__mro__ }}")
    judge = scorer(tmp_path)
    judge._template = JudgeTemplate(str(path), "k")
    assert "unsafe" in verdicts(judge, conversations()[:1])[0].message
