"""Every number that follows from the settings, without loading a model."""

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.config.critic import (
    critic_epochs,
    critic_forward_budget,
    has_critic,
    mini_batches_per_rollout,
    num_actor_steps,
    num_critic_updates,
)
from paceline.config.decisions import decide_old_logprob
from paceline.config.errors import ConfigError
from paceline.config.parallelism import ROLES, role_sizes
from paceline.config.rewards import describe_source, reward_sources
from paceline.config.rules import budget_problem
from paceline.config.schema import AUTO_TOKEN_BUDGET, Config
from paceline.config.sft import is_sft


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    """Derived sizes. Prompts and samples are global; token budgets are per device and micro-batch (0: auto).

    None stands for what is not known before the model or the prompts are read: `max_context` of a Hugging Face
    id without `model.max_context`, and whatever depends on it.
    """

    num_prompts: int
    samples_per_step: int
    mini_batches_per_rollout: int
    samples_per_mini_batch: int
    updates_per_step: int
    total_updates: int
    total_samples: int
    token_budget: int
    forward_token_budget: int
    max_context: int | None
    max_new_tokens: int
    longest_prompt: int | None
    """Longest prompt that leaves room for max_new_tokens; a longer one gets a shorter response."""
    longest_sample: int | None
    """Most tokens one sample can have, prompt and response."""
    max_tokens_per_step: int | None
    max_response_tokens_per_step: int
    max_micro_batches_per_update: int
    """No mini-batch needs more micro-batches than this; short samples need fewer."""
    num_evaluations: int
    completions_per_evaluation: int
    total_evaluation_completions: int


def allowed_new_tokens(num_prompt_tokens: int, max_new_tokens: int, max_context: int | None) -> int:
    """How many tokens a response may have after a prompt of that length; 0 = the prompt leaves no room."""
    if max_context is None:
        return max_new_tokens
    return max(0, min(max_new_tokens, max_context - num_prompt_tokens))


def stated_context(model_path: str) -> int | None:
    """`max_position_embeddings` of a local model folder's config.json, or None where there is none to read.

    Raises `ConfigError` when the folder's config.json is not JSON.
    """
    path = Path(model_path).expanduser() / "config.json"
    if not path.is_file():
        return None
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("model.path", model_path, f"its config.json is not JSON ({error})") from error
    if not isinstance(stated, dict):
        raise ConfigError("model.path", model_path, "its config.json does not hold a model's settings")
    for holder in (stated, stated.get("text_config") or {}):
        if (length := holder.get("max_position_embeddings")) is not None:
            return int(length)
    return None


def batch_arithmetic(config: Config, max_context: int | None = None) -> BatchArithmetic:
    """Derives every size. `max_context` is what the model states, where the caller knows it; otherwise it is read
    from a local model folder. `model.max_context` overrules both."""
    batch, rollout, task, run = config.batch, config.rollout, config.task, config.run
    context = config.model.max_context or max_context or stated_context(config.model.path)
    mini = batch.mini_batch_prompts or batch.num_prompts
    samples, per_mini = batch.num_prompts * batch.num_samples, mini * batch.num_samples
    minis = mini_batches_per_rollout(config)
    updates = minis * batch.num_epochs
    between = (run.num_steps - 1) // run.eval_every if run.eval_every else 0
    evaluations = between + 2 if task.eval_size else 0
    completions = task.eval_size * task.eval_samples
    return BatchArithmetic(
        num_prompts=batch.num_prompts,
        samples_per_step=samples,
        mini_batches_per_rollout=minis,
        samples_per_mini_batch=per_mini,
        updates_per_step=updates,
        total_updates=updates * num_actor_steps(config),
        total_samples=samples * run.num_steps,
        token_budget=batch.token_budget,
        forward_token_budget=batch.forward_token_budget or 2 * batch.token_budget,
        max_context=context,
        max_new_tokens=rollout.max_new_tokens,
        longest_prompt=None if context is None else max(0, context - rollout.max_new_tokens),
        longest_sample=context,
        max_tokens_per_step=None if context is None else samples * context,
        max_response_tokens_per_step=samples * rollout.max_new_tokens,
        max_micro_batches_per_update=_most_micro_batches(
            per_mini, context, batch.token_budget * config.cluster.sequence_parallel_size
        ),
        num_evaluations=evaluations,
        completions_per_evaluation=completions,
        total_evaluation_completions=evaluations * completions,
    )


def _most_micro_batches(num_samples: int, longest: int | None, budget: int) -> int:
    # floor(budget / longest) samples fit whatever their lengths; the rest of the division needs one more
    each = max(1, budget // longest) if longest is not None else 1
    return -(-num_samples // each)


def check_context(config: Config, max_context: int | None = None) -> None:
    """Checks the settings against the context the model states (given, or read from a local folder).

    Raises `ConfigError` when `model.max_context` exceeds it, or the response alone fills it.
    """
    stated = max_context or stated_context(config.model.path)
    if stated is None:
        return
    wanted, limit = config.model.max_context, config.rollout.max_new_tokens
    if wanted is not None and wanted > stated:
        raise ConfigError(
            "model.max_context", wanted, f"the model states at most {stated} positions", str(stated)
        )
    if wanted is None and limit >= stated and not is_sft(config):
        rule = f"must be below the model's context of {stated} tokens, which holds prompt and response"
        raise ConfigError("rollout.max_new_tokens", limit, rule, str(max(1, stated - 1)))


def check_lengths(config: Config, longest_prompt: int, max_context: int | None) -> int:
    """The longest possible sample in tokens, from the longest prompt really there (in tokens).

    Raises `ConfigError` when it exceeds a token budget and `batch.overlong` is refuse.
    """
    room = allowed_new_tokens(longest_prompt, config.rollout.max_new_tokens, max_context)
    longest = longest_prompt + room
    if config.batch.overlong == "refuse":
        problem = budget_problem(config, longest, f"a prompt of {longest_prompt} and a response of {room}")
        if problem is not None:
            raise problem
    return longest


def describe(config: Config, max_context: int | None = None) -> str:
    """The arithmetic as a table for people: what `--dry-run` prints."""
    sizes = batch_arithmetic(config, max_context)
    decision = decide_old_logprob(config)
    batch, source = config.batch, config.task.name or config.task.path
    context = (
        "the model's own, read when it is loaded" if sizes.max_context is None else _tokens(sizes.max_context)
    )
    rows: list[tuple[str, str]] = [
        ("run", f"{config.run.name} in {config.run.dir}, seed {config.run.seed}"),
        ("model", f"{config.model.path}, {config.model.dtype} on {config.cluster.device}"),
        ("task", str(source)),
        ("algorithm", _algorithm(config)),
        ("old log-probs", f"{decision.source} ({decision.reason})"),
        ("prompts per step", f"{sizes.num_prompts:,}"),
        (
            "samples per step",
            f"{sizes.num_prompts:,} prompts x {batch.num_samples:,} samples = {sizes.samples_per_step:,}",
        ),
        (
            "mini-batches per rollout",
            f"{sizes.mini_batches_per_rollout:,} of {sizes.samples_per_mini_batch:,} samples",
        ),
        (
            "updates per step",
            f"{sizes.mini_batches_per_rollout:,} mini-batches x {batch.num_epochs:,} epochs"
            f" = {sizes.updates_per_step:,}",
        ),
        (
            "updates in all",
            f"{sizes.updates_per_step:,} x {num_actor_steps(config):,} steps = {sizes.total_updates:,}",
        ),
        *_critic_rows(config),
        ("samples in all", f"{sizes.total_samples:,}"),
        ("context", context),
        ("longest response", _tokens(sizes.max_new_tokens)),
        ("longest prompt", "not known yet" if sizes.longest_prompt is None else _prompt_room(sizes)),
        ("token budget", f"{_budget(sizes.token_budget)} per micro-batch and device, {batch.layout} layout"),
        ("forward-only budget", _budget(sizes.forward_token_budget)),
        ("micro-batches per update", f"at most {sizes.max_micro_batches_per_update:,}"),
        ("response tokens per step", f"at most {sizes.max_response_tokens_per_step:,}"),
        (
            "all tokens per step",
            "not known yet"
            if sizes.max_tokens_per_step is None
            else f"at most {sizes.max_tokens_per_step:,}",
        ),
        ("evaluation", _evaluation(config, sizes)),
        *_reward_rows(config),
        *_rank_rows(config),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _rank_rows(config: Config) -> list[tuple[str, str]]:
    if config.cluster.num_devices == 1:
        return []
    rows = []
    actor = role_sizes(config)
    for role in ROLES:
        sizes = role_sizes(config, role)
        if role == "actor" or sizes != actor:
            name = "ranks" if role == "actor" else f"ranks of the {role}"
            rows.append((name, f"{sizes.num_ranks:,} = {sizes.describe()}"))
    return rows


def _reward_rows(config: Config) -> list[tuple[str, str]]:
    sources = reward_sources(config)
    if not sources:
        return [("reward", config.task.reward)]
    return [(f"reward {name}", describe_source(config, source)) for name, source in sources.items()]


def _critic_rows(config: Config) -> list[tuple[str, str]]:
    if not has_critic(config):
        return []
    critic, minis = config.critic, mini_batches_per_rollout(config)
    alone = f", alone in the first {critic.pretrain_steps:,}" if critic.pretrain_steps else ""
    budget = critic.token_budget or config.batch.token_budget
    return [
        ("critic", f"{critic.path or config.model.path}, lr {critic.lr:g}"),
        (
            "critic updates in all",
            f"{minis:,} mini-batches x {critic_epochs(config):,} epochs x {config.run.num_steps:,} steps"
            f" = {num_critic_updates(config):,}{alone}",
        ),
        (
            "critic token budget",
            f"{_budget(budget)} per micro-batch and device, forward-only {_budget(critic_forward_budget(config))}",
        ),
    ]


def _tokens(count: int) -> str:
    return f"{count:,} tokens"


def _budget(tokens: int) -> str:
    return "auto (from memory, when the run starts)" if tokens == AUTO_TOKEN_BUDGET else _tokens(tokens)


def _prompt_room(sizes: BatchArithmetic) -> str:
    return f"{_tokens(sizes.longest_prompt or 0)} with the full response; a longer prompt gets a shorter one"


def _algorithm(config: Config) -> str:
    algorithm = config.algorithm
    kl = (
        f"KL {algorithm.kl_coefficient:g} in the {algorithm.kl_placement}"
        if algorithm.kl_coefficient
        else "no KL"
    )
    return (
        f"{algorithm.name}: advantage {algorithm.advantage}, loss {algorithm.loss}, "
        f"aggregation {algorithm.aggregation}, {kl}"
    )


def _evaluation(config: Config, sizes: BatchArithmetic) -> str:
    if not sizes.num_evaluations:
        return "none"
    return (
        f"{sizes.num_evaluations:,} times {config.task.eval_size:,} prompts x {config.task.eval_samples:,} completions "
        f"= {sizes.total_evaluation_completions:,} completions"
    )
