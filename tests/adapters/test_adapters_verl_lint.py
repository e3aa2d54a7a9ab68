"""Every rule of `paceline lint verl` on settings that it must find and on settings that it must not."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from verl_rule_cases import CASES, CLEAN, Case, R

from paceline.adapters.verl.batch_sizes import batch_sizes
from paceline.adapters.verl.findings import Finding
from paceline.adapters.verl.launch import read_launch
from paceline.adapters.verl.lint import RULES, lint_launch, with_rule_table
from paceline.cli import main
from paceline.config import ConfigError

DOCUMENT = Path(__file__).parents[2] / "docs" / "adapters.md"
LAUNCHES = Path(__file__).parent / "launches"


def findings(changes: Mapping[str, str], environment: Mapping[str, str] | None = None) -> list[Finding]:
    settings = {**CLEAN, **changes}
    words = ["python3", "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]
    (launch,) = read_launch(words, environment)
    return lint_launch(launch)


def test_a_clean_launch_has_no_findings() -> None:
    assert findings({}) == []


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    tested_below = {"launch/entry-point", "launch/cut-in-two"}
    assert {rule.id for rule in RULES} == set(CASES) | tested_below
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(("rule", "case"), CASES.items(), ids=CASES.keys())
def test_a_rule_finds_its_fault_and_names_the_setting(rule: str, case: Case) -> None:
    found = [one for one in findings(case.bad, case.bad_environment) if one.rule == rule]
    assert case.key in [one.key for one in found]
    named = next(one for one in found if one.key == case.key)
    if case.suggested is not None:
        assert str(named.suggested) == case.suggested
    assert named.why
    assert named.source


@pytest.mark.parametrize(("rule", "case"), CASES.items(), ids=CASES.keys())
def test_a_rule_is_silent_where_its_fault_is_not(rule: str, case: Case) -> None:
    assert rule not in [one.rule for one in findings(case.good, case.good_environment)]


def test_an_entry_point_that_no_release_has_is_an_error() -> None:
    words = [f"{key}={value}" for key, value in CLEAN.items()]
    (wrong,) = read_launch(["python3", "-m", "verl.experimental.one_step_off_policy.async_main_ppo", *words])
    (right,) = read_launch(["python3", "-m", "verl.experimental.one_step_off_policy.main_ppo", *words])
    assert "launch/entry-point" in [one.rule for one in lint_launch(wrong)]
    assert "launch/entry-point" not in [one.rule for one in lint_launch(right)]


def test_settings_cut_off_by_a_comment_belong_to_the_launch_before_them() -> None:
    *sweep, last = read_launch(str(LAUNCHES / "sweep_small_models.sh"))
    assert len(sweep) == 4
    assert all("launch/cut-in-two" not in [one.rule for one in lint_launch(launch)] for launch in sweep)
    (cut,) = [one for one in lint_launch(last) if one.rule == "launch/cut-in-two"]
    assert cut.key == "trainer.n_gpus_per_node"
    assert not last.is_set("trainer.n_gpus_per_node")


def test_settings_after_a_pipe_are_found(tmp_path: Path) -> None:
    words = " ".join(f"{key}={value}" for key, value in CLEAN.items())
    (launch,) = read_launch(
        f"python3 -m verl.trainer.main_ppo {words} 2>&1 | tee log.txt trainer.resume_mode=disable"
    )
    (cut,) = [one for one in lint_launch(launch) if one.rule == "launch/cut-in-two"]
    assert (cut.key, cut.suggested) == ("trainer.resume_mode", "put them before the pipe")


def test_a_launch_of_another_framework_is_no_launch_of_verls() -> None:
    with pytest.raises(ConfigError, match="no verl training"):
        read_launch("python training/main_async_ppo.py n_nodes=1 actor.path=x rollout.n=8 cluster.fileroot=y")


def test_an_sft_launch_is_refused_rather_than_checked_by_rules_of_rl() -> None:
    settings = "data.train_files=a.parquet data.train_batch_size=128 trainer.total_epochs=1 model.path=m"
    with pytest.raises(ConfigError, match="reinforcement-learning"):
        read_launch(f"torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer {settings}")


def test_interleave_is_read_from_a_trainer_of_ones_own(tmp_path: Path) -> None:
    trainer = tmp_path / "my_trainer.py"
    launch = tmp_path / "run.sh"
    launch.write_text("python3 my_trainer.py " + " ".join(f"{key}={value}" for key, value in CLEAN.items()))
    trainer.write_text("gen = gen.repeat(8, interleave=False)\nbatch = batch.repeat(8, interleave=True)\n")
    assert "rollout/interleave" in [one.rule for one in lint_launch(read_launch(str(launch))[0])]
    trainer.write_text("gen = gen.repeat(8, interleave=False)\nbatch = batch.repeat(8, interleave=False)\n")
    assert "rollout/interleave" not in [one.rule for one in lint_launch(read_launch(str(launch))[0])]


def test_the_batch_arithmetic_follows_verls_normalisation() -> None:
    (launch,) = read_launch(str(LAUNCHES / "dapo_qwen3_235b_ascend.sh"))
    sizes = batch_sizes(launch)
    assert sizes.num_devices == 256
    assert sizes.samples_per_step == 384 * 16
    assert sizes.updates_per_step == 4
    assert sizes.data_parallel == 256 // (4 * 8 * 4)
    assert sizes.mini_batch_samples_per_rank == 96 * 16 / 2
    assert sizes.token_budget == 32768 * 4
    assert sizes.rollout_replicas == 256 // (8 * 16)


def test_a_deprecated_global_size_is_divided_over_the_ranks() -> None:
    (launch,) = read_launch(str(LAUNCHES / "ppo_qwen2_5_7b_critic.sh"))
    sizes = batch_sizes(launch)
    assert (sizes.micro_batch_samples, sizes.micro_batches_per_update) == (4, 4)


EXPECTED_ERRORS = {
    "grpo_qwen3_8b_arrays.sh": [],
    "ppo_qwen2_5_7b_critic.sh": ["batch/no-micro-size"],
    "dapo_qwen3_235b_ascend.sh": [
        "parallel/expert-devices",
        "parallel/context-override",
        "ascend/task-queue-graphs",
    ],
    "separate_async_ray.sh": [],
}


@pytest.mark.parametrize(("name", "errors"), EXPECTED_ERRORS.items())
def test_launches_have_the_errors_that_were_put_into_them(name: str, errors: list[str]) -> None:
    (launch,) = read_launch(str(LAUNCHES / name))
    assert [one.rule for one in lint_launch(launch) if one.severity == "error"] == errors


def test_every_launch_here_is_tested() -> None:
    names = {path.name for path in LAUNCHES.glob("*.sh")}
    assert names == {*EXPECTED_ERRORS, "sweep_small_models.sh"}


def test_a_device_given_from_outside_changes_what_is_found() -> None:
    (launch,) = read_launch(str(LAUNCHES / "grpo_qwen3_8b_arrays.sh"), {"DEVICE": "npu"})
    assert launch.num_devices == 16
    assert "ascend/task-queue-graphs" in [one.rule for one in lint_launch(launch)]


def test_the_command_prints_json_and_exits_with_one_on_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "verl", str(LAUNCHES / "ppo_qwen2_5_7b_critic.sh"), "--json"]) == 1
    (record,) = json.loads(capsys.readouterr().out)
    assert record["batch"]["num_devices"] == 16
    errors = [one for one in record["findings"] if one["severity"] == "error"]
    assert errors[0]["rule"] == "batch/no-micro-size"


def test_a_command_on_the_line_is_linted_with_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{key}={value}" for key, value in {**CLEAN, f"{R}.enforce_eager": "True"}.items()]
    assert main(["lint", "verl", "python3", "-m", "verl.trainer.main_ppo", *words]) == 0
    assert "rollout/eager" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["no/such/script.sh", "echo hello world", "python3 -m verl.trainer.main_ppo 'data.train_files=a"],
)
def test_what_is_no_launch_exits_with_two(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "verl", text]) == 2
    assert "launch" in capsys.readouterr().err


def test_the_documented_rules_are_these() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert with_rule_table(document) == document
