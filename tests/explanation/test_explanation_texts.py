"""What an explanation says: waits that went, who waits for whom, what cannot be known; half a page, two languages."""

import json
import re
import shutil
from pathlib import Path

import pytest
from explained_runs import PlannedRun

from paceline.api import Run
from paceline.cli import main
from paceline.config import ConfigError
from paceline.explanation import explain
from paceline.explanation.explain import AUDIENCES, templates_in
from paceline.types import STAGES

LANGUAGES = ("en", "zh")


def planned(path: Path, **changes: object) -> Path:
    return PlannedRun(path, **changes).write()  # type: ignore[arg-type]


def test_both_languages_have_the_same_templates_with_the_same_values() -> None:
    english, chinese = templates_in("en"), templates_in("zh")
    assert english.keys() == chinese.keys()
    for key, text in english.items():
        assert sorted(re.findall(r"{\w+}", text)) == sorted(re.findall(r"{\w+}", chinese[key])), key
    assert {f"plain.{stage}" for stage in STAGES} <= english.keys()


def test_chinese_templates_are_chinese() -> None:
    for key, text in templates_in("zh").items():
        words = re.sub(r"{\w+}|`[^`]*`|update_actor|Critic", "", text)
        assert not re.search(r"[A-Za-z]{3,}", words), key
        assert not re.search(r"[,;:?!] ?[\u4e00-\u9fff]|[\u4e00-\u9fff][,;:?!.]", words), (
            f"{key}: western punctuation"
        )


@pytest.mark.parametrize("audience", AUDIENCES)
@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_is_half_a_page(tmp_path: Path, lang, audience) -> None:
    run = planned(tmp_path / "a", slower=(1.0, 1.3), tokens=(900, 1000))
    other = planned(tmp_path / "b", slower=(1.0, 1.0), tokens=(1000, 1000), seed=3)
    text = explain(run, other, lang, audience).text
    assert len(text) < (2600 if lang == "en" else 1100)
    assert "{" not in text


def test_the_share_of_the_update_and_of_every_other_stage_is_said(tmp_path: Path) -> None:
    run = planned(
        tmp_path / "a", noise=0.0, gap_s=0.0, stages={("rollout", ""): 3.0, ("update_actor", ""): 1.0}
    )
    text = explain(run).text
    assert "One step takes 4 s" in text
    assert "update_actor, the training proper, takes 25 % of it (1 s)" in text
    assert "rollout 75 % (3 s)" in text
    assert "unaccounted" not in text
    assert "占 25 %" in explain(run, lang="zh").text


def test_an_unequal_rank_is_named_and_equal_ones_are_called_balanced(tmp_path: Path) -> None:
    unequal = explain(planned(tmp_path / "a", slower=(1.0, 1.0, 2.0), tokens=(10, 10, 40))).paragraphs[
        "balance"
    ]
    assert "Tokens of update_actor are unequal between ranks: rank 2 has most, 2.00 times the mean" in unequal
    assert "Active time is unequal: rank 2 is busy longest" in unequal
    even = explain(planned(tmp_path / "b", slower=(1.0, 1.0), tokens=(10, 10))).paragraphs["balance"]
    assert even.count("balanced") == 2


def test_the_wait_that_a_feature_removed_is_said_in_seconds(tmp_path: Path) -> None:
    stages = {("rollout", ""): 1.0, ("update_actor", ""): 2.0, ("checkpoint", "queue"): 0.5}
    before = planned(
        tmp_path / "before", stages=stages, settings={"checkpoint": {"asynchronous": False, "every": 1}}
    )
    after = planned(
        tmp_path / "after",
        stages=stages | {("checkpoint", "queue"): 0.1},
        seed=1,
        settings={"checkpoint": {"asynchronous": True, "every": 1}},
    )
    removed = explain(after, before).paragraphs["removed"]
    assert "`checkpoint.asynchronous=true` (there: `false`)" in removed
    assert re.search(r"The one difference is .+: with it, checkpoint blocking \d+ ms less per step", removed)
    assert "every=1" not in removed
    assert "检查点阻塞减少" in explain(after, before, "zh").paragraphs["removed"]
    assert "checkpoint blocking" in explain(after, before, audience="manager").paragraphs["removed"]


def test_a_change_in_stages_that_the_feature_does_not_touch_is_laid_at_the_machine_s_door(
    tmp_path: Path,
) -> None:
    stages = {("rollout", ""): 1.0, ("update_actor", ""): 2.0, ("checkpoint", "queue"): 0.5}
    off, on = ({"checkpoint": {"asynchronous": value}} for value in (False, True))
    before = planned(tmp_path / "x", stages=stages, settings=off)
    faster = stages | {("checkpoint", "queue"): 0.1}
    after = planned(tmp_path / "y", stages=faster, settings=on)
    assert "machine's" not in explain(after, before).paragraphs["removed"]
    lucky = planned(tmp_path / "z", stages=faster | {("rollout", ""): 0.7}, settings=on)
    removed = explain(lucky, before).paragraphs["removed"]
    assert "As rollout changed too, which that feature is not known to touch" in removed


def test_several_differences_are_not_laid_at_one_feature_s_door(tmp_path: Path) -> None:
    stages = {("rollout", ""): 1.0, ("reward", "queue"): 0.5, ("update_actor", ""): 2.0}
    before = planned(
        tmp_path / "x", stages=stages, settings={"checkpoint": {"asynchronous": False}, "train": {"lr": 1}}
    )
    after = planned(
        tmp_path / "y",
        stages=stages | {("reward", "queue"): 0.1},
        settings={"checkpoint": {"asynchronous": True}, "train": {"lr": 2}},
    )
    removed = explain(after, before).paragraphs["removed"]
    assert "queue wait" in removed
    assert "paceline ablate" in removed
    assert "The one difference" not in removed


def test_runs_that_differ_by_chance_are_not_called_different(tmp_path: Path) -> None:
    found = [
        explain(planned(tmp_path / f"a{seed}", seed=seed), planned(tmp_path / f"b{seed}", seed=100 + seed))
        for seed in range(6)
    ]
    within = [one for one in found if "is within what steps vary" in one.paragraphs["gain"]]
    assert len(within) >= 5
    assert all("No setting differs" in one.paragraphs["removed"] for one in found)


def test_two_runs_without_steps_in_common_are_not_compared(tmp_path: Path) -> None:
    long, short = planned(tmp_path / "a"), planned(tmp_path / "b", num_steps=2)
    assert "too few steps" in explain(long, short).paragraphs["gain"]


def test_a_run_whose_spans_name_no_cause_says_that_causes_cannot_be_told(tmp_path: Path) -> None:
    run = planned(tmp_path / "a", stages={("rollout", ""): 1.0, ("update_actor", ""): 2.0})
    assert "cannot be told" in explain(run).paragraphs["waits"]


def test_the_command_prints_text_or_json_and_refuses_what_it_has_no_words_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(planned(tmp_path / "a"))
    assert main(["explain", run, "--lang", "zh", "--for", "manager"]) == 0
    assert "训练步" in capsys.readouterr().out
    assert main(["explain", run, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["paragraphs"]["step"].startswith("One step takes")
    assert {figure["key"] for figure in record["figures"]} >= {"step_s", "stage_share/update_actor"}
    assert main(["explain", run, "--lang", "de"]) == 2
    assert main(["explain", run, "--for", "nobody"]) == 2
    assert main(["explain", str(tmp_path / "nowhere")]) == 2


def test_a_run_without_a_finished_step_is_refused(tmp_path: Path) -> None:
    run = planned(tmp_path / "a")
    shutil.rmtree(run / "ledger")
    with pytest.raises(ConfigError):
        explain(run)


def test_the_same_in_python(tmp_path: Path) -> None:
    run, other = planned(tmp_path / "a"), planned(tmp_path / "b", seed=1)
    assert Run(run).explain(lang="zh") == explain(run, lang="zh").text
    assert Run(run).explain(Run(other)) == explain(run, other).text
    with pytest.raises(ConfigError):
        Run(run).explain(audience="nobody")
