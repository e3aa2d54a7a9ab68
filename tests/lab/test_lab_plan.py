"""The runs of an ablation: their configs, and the order that drift cannot favour."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import ConfigError
from paceline.lab.arms import combine, parse_features
from paceline.lab.plan import AblationSettings, PlannedRun, make_plan, order_of_round
from paceline.lab.results import BASELINE

RECIPE = ["model.path=somewhere", "task.name=word_sorting", "batch.layout=padded", "checkpoint.every=5"]


def plan_of(tmp_path: Path, features: str, *overrides: str, together: str = "", **settings):
    arms = parse_features([features])
    arms += combine(arms, [together] if together else [])
    return make_plan(None, [*RECIPE, *overrides], arms, AblationSettings(**settings), tmp_path / "out")


def config_of(plan, arm: str):
    return plan.config(PlannedRun(f"r00-{arm}", arm, 0, 0))


@given(st.integers(1, 9), st.integers(1, 20).map(lambda half: 2 * half))
def test_steady_drift_favours_no_arm(num_arms: int, num_rounds: int) -> None:
    """Over an even number of rounds every arm is as long before the baseline as after it."""
    names = [BASELINE, *(f"a{index}" for index in range(num_arms))]
    distance = dict.fromkeys(names, 0)
    for number in range(num_rounds):
        order = order_of_round(names, number)
        assert sorted(order) == sorted(names)
        for name in names:
            distance[name] += order.index(name) - order.index(BASELINE)
    assert set(distance.values()) == {0}


def test_every_run_has_the_seed_and_prompts_of_the_baseline_and_its_own_settings(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "packing,no_kl:algorithm.kl_coefficient=0.1", together="packing+no_kl")
    baseline, both = config_of(plan, BASELINE), config_of(plan, "packing+no_kl")
    assert baseline.batch.layout == "padded" and both.batch.layout == "packed"
    assert both.algorithm.kl_coefficient == 0.1
    for section in ("task", "model", "reward", "cluster"):
        assert getattr(both, section) == getattr(baseline, section)
    assert both.run.seed == baseline.run.seed
    assert both.run.num_steps == plan.settings.num_steps
    assert both.rollout.replay == baseline.rollout.replay == str(plan.folder / "recording")


def test_what_no_arm_is_about_is_left_out_of_steps(tmp_path: Path) -> None:
    without = config_of(plan_of(tmp_path, "packing"), BASELINE)
    assert without.task.eval_size == 0 and without.checkpoint.every == 0 and not without.checkpoint.save_final
    about_it = config_of(plan_of(tmp_path, "rare:checkpoint.every=50"), BASELINE)
    assert about_it.checkpoint.every == 5


@pytest.mark.parametrize(
    ("features", "mode"),
    [
        ("packing,no_recompute:train.gradient_checkpointing=all", "replay"),
        ("packing,slots:rollout.max_running=4", "sample"),
        ("packing,more:batch.num_samples=16", "sample"),
        ("dynamic:algorithm.dynamic_sampling=true", "sample"),
        ("tp:cluster.num_threads=1", "sample"),
    ],
)
def test_rollouts_are_replayed_where_every_feature_acts_on_training(
    tmp_path: Path, features: str, mode: str
) -> None:
    plan = plan_of(tmp_path, features, "cluster.num_threads=2")
    assert plan.mode == mode
    assert (plan.runs()[0].arm == "recording") == (mode == "replay")
    assert plan_of(tmp_path, features, "cluster.num_threads=2", rollouts="sample").mode == "sample"


def test_runs_come_in_rounds(tmp_path: Path) -> None:
    runs = plan_of(tmp_path, "packing", num_pairs=2).runs()
    assert [run.name for run in runs] == [
        "recording",
        "r00-baseline",
        "r00-packing",
        "r01-packing",
        "r01-baseline",
    ]


def test_a_supervised_recipe_is_compared_without_rollouts(tmp_path: Path) -> None:
    plan = make_plan(
        None,
        ["model.path=m", "task.path=rows.jsonl", "schedule.name=sft", "batch.layout=padded"],
        parse_features(["packing"]),
        AblationSettings(num_steps=5),
        tmp_path,
    )
    assert plan.command == "sft" and plan.mode == "sample" and config_of(plan, BASELINE).sft.max_steps == 5


@pytest.mark.parametrize(
    ("features", "settings", "message"),
    [
        ("packed:batch.layout=padded", {}, "changes nothing"),
        ("bad:train.lr=-1", {}, "train.lr"),
        ("packing", {"num_pairs": 0}, "--pairs"),
        ("packing", {"num_steps": 2, "num_warmup": 2}, "--warmup"),
        ("packing", {"alpha": 1.0}, "--alpha"),
        ("packing", {"margin": -0.1}, "--margin"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_before_the_first_run(
    tmp_path: Path, features: str, settings: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(tmp_path, features, **settings)
    assert not (tmp_path / "out").exists()


def test_pairs_may_be_added_later_and_nothing_else_may_change(tmp_path: Path) -> None:
    first = plan_of(tmp_path, "packing", num_pairs=2).identity()
    assert plan_of(tmp_path, "packing", num_pairs=6).identity() == first
    assert plan_of(tmp_path, "packing", num_steps=9).identity() != first
    assert plan_of(tmp_path, "packing", "train.lr=1e-5").identity() != first
    assert plan_of(tmp_path, "packing,no_kl:algorithm.kl_coefficient=0.1").identity() != first
