"""An arm that may be the baseline under another name is refused, and the refusal says what to state."""

from pathlib import Path

import pytest

from paceline.config import Config, ConfigError
from paceline.diagnosis.features import FEATURES
from paceline.lab.arms import parse_features
from paceline.lab.effects import IDLE, LEFT_TO_THE_RUN, MODES_CALLED_AUTO, ON_CUDA_ALONE
from paceline.lab.plan import AblationSettings, make_plan

RECIPE = ["model.path=somewhere", "task.name=word_sorting", "train.preset=plain"]
SUPERVISED = ["model.path=m", "task.path=rows.jsonl", "schedule.name=sft"]


def plan_of(features: str, *overrides: str, recipe: list[str] = RECIPE, **settings):
    return make_plan(
        None, [*recipe, *overrides], parse_features([features]), AblationSettings(**settings), Path("o")
    )


@pytest.mark.parametrize(
    ("features", "stated"),
    [
        ("share_prefixes", "batch.share_prefixes=off"),
        ("paged_cache", "rollout.cache=slots"),
        ("mine:batch.share_prefixes=off", "batch.share_prefixes=on"),
        ("num_threads:cluster.num_threads=2", "cluster.num_threads=4"),
        ("half:model.dtype=bfloat16", "model.dtype=float32"),
    ],
)
def test_a_choice_that_the_baseline_leaves_to_the_run_has_to_be_stated(features: str, stated: str) -> None:
    key, _, value = stated.partition("=")
    named = key if value == "4" else stated.replace("dtype=float32", "dtype=native or float32")
    with pytest.raises(ConfigError, match="compare a setting with itself") as refusal:
        plan_of(features)
    assert named in str(refusal.value.nearest) and "in the baseline" in str(refusal.value.nearest)
    assert plan_of(features, stated).arms[1].keys


def test_a_supervised_recipe_states_its_kernels_too() -> None:
    with pytest.raises(ConfigError, match=r"nearest: sft\.liger=off in the baseline"):
        plan_of("liger:sft.liger=on", recipe=SUPERVISED)
    assert plan_of("liger:sft.liger=on", "sft.liger=off", recipe=SUPERVISED)


def test_an_arm_that_leaves_the_choice_to_the_run_is_refused_as_well() -> None:
    with pytest.raises(ConfigError, match=r"nearest: batch\.share_prefixes=on in the feature"):
        plan_of("sharing:batch.share_prefixes=auto", "batch.share_prefixes=off")


@pytest.mark.parametrize("features", ["speculation", "budget:batch.token_budget=auto"])
def test_auto_that_is_a_mode_of_its_own_can_be_compared(features: str) -> None:
    assert plan_of(features).arms[1].keys


@pytest.mark.parametrize(
    ("features", "without", "acting"),
    [
        ("share_prefixes", ["batch.share_prefixes=off", "batch.layout=padded"], ["batch.share_prefixes=off"]),
        ("skip_zero_advantage", ["algorithm.kl_coefficient=0.1"], ["algorithm.kl_placement=reward"]),
        ("logprob_bypass", ["rollout.engine=vllm", "batch.num_epochs=2"], ["batch.num_epochs=1"]),
        ("fused_layers", ["cluster.device=cpu"], ["cluster.device=cuda"]),
        ("param_offload", [], ["algorithm.kl_coefficient=0.1"]),
        ("keep_gathered", [], ["cluster.num_devices=2"]),
        ("forward_prefetch", [], ["cluster.num_devices=2"]),
        ("async_checkpoint", ["checkpoint.every=0"], ["checkpoint.every=2"]),
        ("checkpoint_interval:checkpoint.every=20", ["checkpoint.every=0"], ["checkpoint.every=2"]),
        ("eval_interval:run.eval_every=20", ["run.eval_every=10"], ["run.eval_every=2"]),
        ("threshold:train.activation_offload_min_kb=1", [], ["train.activation_offload=true"]),
        ("layers:train.checkpoint_every=3", [], ["train.gradient_checkpointing=every_k"]),
        ("kept:train.selective_keep=attention", [], ["train.gradient_checkpointing=selective"]),
    ],
)
def test_a_setting_that_does_nothing_in_this_recipe_is_no_feature(
    features: str, without: list[str], acting: list[str]
) -> None:
    opposites = {
        "skip_zero_advantage": "batch.skip_zero_advantage=false",
        "logprob_bypass": "algorithm.old_logprob=recompute",
        "async_checkpoint": "checkpoint.asynchronous=false",
    }
    baseline = [opposites[features]] if features in opposites else []
    baseline += ["checkpoint.save_final=false"]
    with pytest.raises(ConfigError, match="changes nothing that acts") as refusal:
        plan_of(features, *baseline, *without)
    assert "because" in refusal.value.rule
    kept = [one for one in without if one.partition("=")[0] not in {two.partition("=")[0] for two in acting}]
    if features == "share_prefixes":
        kept = []
    assert plan_of(features, *baseline, *kept, *acting).arms[1].keys


def test_fused_layers_take_a_device_that_is_stated() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.device=cuda in the baseline"):
        plan_of("fused_layers")


def test_replayed_rollouts_leave_sampling_out() -> None:
    with pytest.raises(ConfigError, match="nearest: --rollouts sample"):
        plan_of("slots:rollout.max_running=4", rollouts="replay")
    assert plan_of("slots:rollout.max_running=4").mode == "sample"


def test_what_the_recipe_has_already_names_its_opposite() -> None:
    with pytest.raises(ConfigError, match=r"nearest: batch\.layout=padded"):
        plan_of("packing")


def test_no_feature_of_the_map_compares_a_default_that_the_run_decides(tmp_path: Path) -> None:
    """Of every feature whose setting is `auto` by default, something is known: refused, a mode, or followed from the
    others."""
    default = Config().model_dump()
    open_ones = {
        key
        for feature in FEATURES.values()
        for key in feature.keys
        if default[key.partition(".")[0]].get(key.partition(".")[2]) == "auto"
    }
    assert open_ones == {"batch.share_prefixes", "rollout.cache", "algorithm.old_logprob"}
    known = (
        {key for idle in IDLE for key in idle.keys} | MODES_CALLED_AUTO | ON_CUDA_ALONE | set(LEFT_TO_THE_RUN)
    )
    every = {f"{section}.{key}" for section, content in default.items() for key in content} | {
        "rollout.speculation"
    }
    assert known <= every  # no rule is about a setting that was renamed
