"""Runs of other frameworks: what their logs allow is said, and what they do not is not guessed."""

import json
from pathlib import Path

import pytest

from paceline.adapters.run import ImportedRun, ImportedStep, StageTime, write_run
from paceline.config import ConfigError
from paceline.diagnosis import diagnose, predict
from paceline.diagnosis.features import FEATURES
from paceline.diagnosis.switches import BOTTLENECK
from paceline.diagnosis.text import diagnosis_text
from paceline.telemetry.causes.records import StepCauses, cause_lines, causes_path


def imported(folder: Path, num_steps: int = 6, **stages: float) -> Path:
    steps = []
    for number in range(1, num_steps + 1):
        wall = 10.0 + (20.0 if number == 1 else 0.0) + 0.01 * number
        times = {name: StageTime(seconds) for name, seconds in stages.items()}
        tail = {
            "timing_s/agent_loop/generate_sequences/max": 4.0,
            "timing_s/agent_loop/generate_sequences/mean": 1.0,
        }
        steps.append(ImportedStep(number, wall, times, metrics={"updates/applied": 1.0}, foreign=tail))
    return write_run(ImportedRun("verl", "theirs", steps, notes=["Their own sentence."]), folder)


def test_an_imported_log_is_diagnosed_from_its_stages_and_the_rest_is_unaccounted(tmp_path: Path):
    found = diagnose(imported(tmp_path / "run", rollout=5.0, old_logprob=1.5, update_actor=2.0))
    assert found.num_steps == 5 and found.step_s == pytest.approx(10.04)
    assert found.unaccounted_s == pytest.approx(1.54)
    assert found.bottleneck is not None and found.bottleneck.stage == "rollout"
    assert {stage.source for stage in found.stages} == {"nature"}
    assert not found.bottleneck.is_measured
    assert "as a rule memory-bound, not measured" in diagnosis_text(found)
    assert not [
        switch for switch in found.switches if switch.finding == BOTTLENECK
    ]  # nobody knows what is on there
    by_id = {one.id: one for one in found.findings}
    assert by_id["long_tail"].seconds == pytest.approx(3.0)
    assert by_id["redundant_logprob"].seconds == pytest.approx(1.5)
    assert "unaccounted" not in by_id
    assert {"imported", "one_rank", "no_causes", "Their own sentence."} <= set(found.notes)


def test_causes_of_a_profiled_step_decide_what_bounds_a_stage(tmp_path: Path):
    run_dir = imported(tmp_path / "run", rollout=5.0, update_actor=2.0)
    path = causes_path(run_dir, 0)
    path.parent.mkdir(parents=True)
    cells = {
        "compute": 0.2,
        "memory": 0.1,
        "communication": 1.4,
        "scheduling": 0.2,
        "queue": 0.1,
        "data": 0.0,
    }
    lines = cause_lines(StepCauses(3, {"update_actor": cells}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = diagnose(run_dir)
    assert (
        found.num_profiled_steps == 0 and "causes_of_profiled_steps" in found.notes
    )  # the step counts all the same
    update = next(stage for stage in found.stages if stage.stage == "update_actor")
    assert update.kind == "communication" and update.source == "causes"
    assert update.cells is not None and sum(update.cells.values()) == pytest.approx(update.seconds)


def test_every_switch_names_a_feature_of_the_map_and_can_be_predicted_by_itself(tmp_path: Path):
    run_dir = imported(tmp_path / "run", rollout=5.0, old_logprob=1.5, update_actor=2.0, checkpoint=1.2)
    found = diagnose(run_dir)
    assert {switch.feature for switch in found.switches} <= set(FEATURES)
    kept = [switch.saved_s for switch in found.switches if not switch.changes_training]
    assert kept == sorted(kept, reverse=True) and kept[0] == found.switches[0].saved_s
    predicted = predict(run_dir, "logprob_bypass")
    assert predicted is not None and predicted.saved_s == pytest.approx(1.5)
    assert predict(run_dir, "share_prefixes") is None


def test_a_switch_that_changes_what_is_learned_comes_after_all_that_do_not_however_much_it_saves(
    tmp_path: Path,
):
    run_dir = imported(tmp_path / "run", rollout=2.0, old_logprob=1.5, update_actor=2.0, checkpoint=4.0)
    found = diagnose(run_dir)
    changing = [switch.changes_training for switch in found.switches]
    assert changing == sorted(changing)
    adapters = found.switches[changing.index(True)]
    assert adapters.feature == "lora"
    assert adapters.saved_s > min(one.saved_s for one in found.switches[: changing.index(True)])
    for lang, apart in (("en", "but changes what is learned"), ("zh", "会改变训练结果")):
        page = diagnosis_text(found, lang)
        assert page.index("old_logprob=auto") < page.index(apart) < page.index("lora.rank")


def test_a_record_of_nothing_finished_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        diagnose(tmp_path)
