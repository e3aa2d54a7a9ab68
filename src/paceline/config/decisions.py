"""Choices that follow from the settings and are printed and recorded with their reason."""

from dataclasses import dataclass
from typing import Literal

from paceline.config.schema import Config

LogprobSource = Literal["current", "rollout", "recompute"]

ENGINES_WITH_THE_TRAINERS_KERNELS = frozenset({"native"})
"""Engines whose sampled log-probs are those the trainer would score, also where they hold a copy of the weights."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the old log-probs come from, and why."""

    source: LogprobSource
    reason: str


def shares_weights(config: Config) -> bool:
    """Whether rollouts run on the trainer's own parameters, so that nothing is loaded after an update."""
    return config.rollout.engine == "native" and config.rollout.num_replicas == 1


def num_engines_beside_the_trainer(config: Config) -> int:
    """Rollout engines on the trainer's own device, for each training process. Servers that run already are taken to be
    elsewhere; of named devices, the trainer's is number 0."""
    rollout = config.rollout
    if rollout.engine == "sglang" or rollout.vllm.addresses:
        return 0
    if rollout.replicas.devices:
        return int(0 in rollout.replicas.devices)
    return rollout.num_replicas


def sleeps_between_rollouts(config: Config) -> bool:
    """Whether the engine gives memory back while the trainer updates; an engine in processes of its own does so where
    they share the trainer's device."""
    rollout = config.rollout
    if rollout.engine == "vllm":
        return rollout.vllm.sleep_level > 0 and not rollout.replicas.devices
    if rollout.engine == "sglang":
        return rollout.sglang.sleep
    return not rollout.keep_cache


def has_one_update_per_rollout(config: Config) -> bool:
    """Whether a rollout is used for exactly one optimiser update."""
    batch = config.batch
    return batch.num_epochs == 1 and batch.mini_batch_prompts in (None, batch.num_prompts)


def decide_old_logprob(config: Config, wanted: str | None = None) -> Decision:
    """The source of the old log-probs for `wanted` (default: `algorithm.old_logprob`).

    With one update per rollout the policy that sampled is the policy that is updated: its current log-probs,
    detached, are the old ones and cost nothing. Later updates of the same rollout need the values from before the
    first; an engine on the trainer's own weights has sampled with exactly those.
    """
    wanted = config.algorithm.old_logprob if wanted is None else wanted
    if wanted == "current":
        return Decision("current", "asked for; one update per rollout")
    if wanted == "rollout":
        return Decision("rollout", "asked for; the log-probs the engine sampled with")
    if wanted == "recompute":
        return Decision("recompute", "asked for; one more forward pass before the first update")
    if has_one_update_per_rollout(config):
        return Decision(
            "current", "one update per rollout: the current log-probs, detached, are the old ones"
        )
    engine = config.rollout.engine
    if shares_weights(config):
        return Decision("rollout", f"the {engine} engine samples with the trainer's own weights")
    if engine in ENGINES_WITH_THE_TRAINERS_KERNELS:
        return Decision(
            "rollout", f"{engine} replicas hold the trainer's weights and compute as the trainer does"
        )
    return Decision(
        "recompute",
        f"several updates per rollout, and {engine} computes log-probs with kernels of its own, on its own copy of the "
        "weights",
    )


SHARING_OVERHEAD = 0.19
"""What a computed position costs more when prompts are shared (gathers and merges around attention). Measured on one
H200, 1.7B shape, 512-token prompts, 8 responses of 256 tokens: 20.1 us a position against 16.9 us."""


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Whether a group's prompt is computed once in training, and why. `predicted_saving` is a share of the update's
    time, negative where sharing would cost more than it saves."""

    shares: bool
    predicted_saving: float
    reason: str


def decide_prefix_sharing(config: Config, mean_prompt_tokens: float) -> PrefixSharing:
    """The decision for `batch.share_prefixes`, from the prompts' mean length and the longest possible responses.

    Responses shorter than `rollout.max_new_tokens` make the saving larger than predicted, never smaller.
    """
    batch, response_tokens = config.batch, config.rollout.max_new_tokens
    apart = batch.num_samples * (mean_prompt_tokens + response_tokens)
    shared = mean_prompt_tokens + batch.num_samples * response_tokens
    saving = 1.0 - (1.0 + SHARING_OVERHEAD) * shared / apart
    facts = (
        f"{mean_prompt_tokens:.0f}-token prompts, {batch.num_samples} responses of at most {response_tokens}: "
        f"predicted {saving:+.0%} of the update's time"
    )
    if batch.layout == "padded":
        return PrefixSharing(False, saving, "the padded layout has a row for every sample")
    if batch.share_prefixes != "auto":
        return PrefixSharing(batch.share_prefixes == "on", saving, f"asked for; {facts}")
    return PrefixSharing(saving > 0.0, saving, facts)
