"""Advantages, losses, KL and rewards of a launch in paceline's words."""

from typing import Any

from paceline.adapters.verl.defaults import ACTOR
from paceline.adapters.verl.translation_state import Translator
from paceline.config.presets import PRESETS

_ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "gae": "ppo",
}
_LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
_AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
_ESTIMATES = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def translate_algorithm(state: Translator) -> None:
    """Section `algorithm`, with the preset of the named algorithm as what need not be written."""
    name = _name(state)
    preset = PRESETS[name]
    state.put("algorithm.name", name)
    _loss(state, preset)
    _kl(state)
    state.copy(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient")
    if name == "ppo":
        _critic(state)
    _sampling_and_length(state, preset)
    _correction(state)


def _name(state: Translator) -> str:
    estimator = str(state.take("algorithm.adv_estimator"))
    normalised = state.take("algorithm.norm_adv_by_std_in_grpo")
    name = _ESTIMATORS.get(estimator)
    if name is None:
        state.missing["algorithm.adv_estimator"] = (
            f"{estimator}: no such advantage here; the recipe has grpo instead"
        )
        return "grpo"
    if name == "grpo" and normalised is False:
        return "dr_grpo"
    if name == "ppo" and state.launch.get("critic.enable") is False:
        state.missing["critic.enable"] = "gae without a critic"
    return name


def _loss(state: Translator, preset: dict[str, Any]) -> None:
    mode = str(state.take(f"{ACTOR}.policy_loss.loss_mode"))
    loss = _LOSSES.get(mode)
    if loss is None:
        state.missing[f"{ACTOR}.policy_loss.loss_mode"] = (
            f"{mode}: no such loss here; the recipe has the clipped one"
        )
        loss = "clip"
    state.put("algorithm.loss", loss, preset["loss"])
    whole = state.take(f"{ACTOR}.clip_ratio")
    for side in ("low", "high"):
        # verl's own defaults of both sides stand above clip_ratio, so that clip_ratio alone changes nothing
        value = state.take(f"{ACTOR}.clip_ratio_{side}")
        state.put(f"algorithm.clip_{side}", whole if value is None else value, preset[f"clip_{side}"])
    dual = state.take(f"{ACTOR}.clip_ratio_c")
    if loss == "clip":
        state.put("algorithm.dual_clip", dual, preset["dual_clip"])
    aggregation = str(state.take(f"{ACTOR}.loss_agg_mode"))
    if aggregation in _AGGREGATIONS:
        state.put("algorithm.aggregation", aggregation, preset["aggregation"])
    else:
        state.missing[f"{ACTOR}.loss_agg_mode"] = f"{aggregation}: no such aggregation here"


def _kl(state: Translator) -> None:
    in_loss, in_reward = state.take(f"{ACTOR}.use_kl_loss"), state.take("algorithm.use_kl_in_reward")
    weight, kind = state.take(f"{ACTOR}.kl_loss_coef"), state.take(f"{ACTOR}.kl_loss_type")
    reward_weight, reward_kind = state.take("algorithm.kl_ctrl.kl_coef"), state.take("algorithm.kl_penalty")
    if in_loss is True and in_reward is True:
        state.missing["algorithm.use_kl_in_reward"] = (
            "a KL in loss and reward at once; the recipe has the loss's"
        )
    if in_loss is not True and in_reward is not True:
        return
    is_reward = in_loss is not True
    weight, kind = (reward_weight, reward_kind) if is_reward else (weight, kind)
    estimator = _ESTIMATES.get(str(kind))
    if estimator is None:
        key = "algorithm.kl_penalty" if is_reward else f"{ACTOR}.kl_loss_type"
        state.missing[key] = f"{kind}: no such estimator here; the recipe has k3"
    if state.take("algorithm.kl_ctrl.type") == "adaptive" and is_reward:
        state.missing["algorithm.kl_ctrl.type"] = "adaptive KL weight; it is fixed here"
    if not weight:
        state.differs.append("a KL with weight 0 is left out: no reference model is loaded for it")
        return
    state.put("algorithm.kl_coefficient", float(weight))
    state.put("algorithm.kl_estimator", estimator)
    state.put("algorithm.kl_placement", "reward" if is_reward else "loss")


def _critic(state: Translator) -> None:
    state.copy("algorithm.gamma", "algorithm.gamma")
    state.copy("algorithm.lam", "algorithm.gae_lambda")
    state.put("algorithm.value_clip", _or(state.take("critic.cliprange_value"), 0.5))
    state.copy("critic.model.path", "critic.path")
    state.put("critic.lr", _or(state.take("critic.optim.lr"), 1e-5))
    state.put("critic.grad_clip", state.take("critic.grad_clip"))
    state.put("critic.pretrain_steps", state.take("trainer.critic_warmup"))
    epochs = state.take("critic.ppo_epochs")
    state.put("critic.num_epochs", epochs)
    if state.take("critic.use_dynamic_bsz") is True:
        state.put("critic.token_budget", state.take("critic.ppo_max_token_len_per_gpu"))
        state.put("critic.forward_token_budget", state.take("critic.forward_max_token_len_per_gpu"))


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _sampling_and_length(state: Translator, preset: dict[str, Any]) -> None:
    if state.take("algorithm.filter_groups.enable") is True:
        state.put("algorithm.dynamic_sampling", True, preset["dynamic_sampling"])
        metric = state.take("algorithm.filter_groups.metric")
        if metric not in (None, "acc", "score", "seq_final_reward", "seq_reward"):
            state.missing["algorithm.filter_groups.metric"] = "groups are compared by their score"
        limit = state.take("algorithm.filter_groups.max_num_gen_batches")
        if isinstance(limit, int) and limit > 0:
            state.put("algorithm.max_generations", limit)
        elif limit == 0:
            state.missing["algorithm.filter_groups.max_num_gen_batches"] = (
                "without a bound; there is always one here"
            )
    for prefix in ("reward_model", "reward"):
        block = f"{prefix}.reward_kwargs.overlong_buffer_cfg"
        if state.take(f"{block}.enable") is not True:
            continue
        factor = state.take(f"{block}.penalty_factor")
        state.put("algorithm.overlong_cache", state.take(f"{block}.len"), preset["overlong_cache"])
        state.take(f"{block}.log")
        if factor not in (None, 1, 1.0):
            state.missing[f"{block}.penalty_factor"] = "the penalty falls to -1 at the limit"


def _correction(state: Translator) -> None:
    bypass = state.take("algorithm.rollout_correction.bypass_mode")
    if bypass is True:
        state.differs.append(
            "bypass_mode is decided here by whether a rollout has one update (algorithm.old_logprob)"
        )
    for name in ("rollout_is", "rollout_rs"):
        key = f"algorithm.rollout_correction.{name}"
        if state.take(key) is not None:
            state.missing[key] = (
                "the engine samples with the trainer's own weights: nothing is to be corrected"
            )
            state.take(f"{key}_threshold")
