"""Rules that span several settings. Each is one function: a config in, the problem (or None) out."""

from collections.abc import Callable

from paceline.config.agent_rules import AGENT_RULES
from paceline.config.critic import has_critic, mini_batches_per_rollout, num_actor_steps
from paceline.config.critic_rules import CRITIC_RULES
from paceline.config.decisions import decide_old_logprob, has_one_update_per_rollout
from paceline.config.engine_rules import ENGINE_RULES
from paceline.config.errors import ConfigError
from paceline.config.gradient_sync_rules import GRADIENT_SYNC_RULES
from paceline.config.parallelism import ROLES, role_sizes
from paceline.config.reward_rules import REWARD_RULES
from paceline.config.schema import AUTO_TOKEN_BUDGET, Config
from paceline.config.sft import is_sft, sft_ignores_no_setting, sft_settings_need_sft

Rule = Callable[[Config], ConfigError | None]

ENGINES_WITH_LOGPROBS = frozenset({"native", "vllm", "sglang"})
"""Engines that return the log-prob of every sampled token."""


def model_is_named(config: Config) -> ConfigError | None:
    if config.model.path:
        return None
    return ConfigError("model.path", "", "must name a Hugging Face id or a local folder")


def run_name_is_one_folder(config: Config) -> ConfigError | None:
    name = config.run.name
    if name and name not in (".", "..") and "/" not in name and "\\" not in name:
        return None
    nearest = name.replace("\\", "/").strip("./").replace("/", "-") or "run"
    return ConfigError(
        "run.name", name, "must be the name of one folder; put its parent into run.dir", nearest
    )


def adapters_have_no_dropout(config: Config) -> ConfigError | None:
    if config.lora.dropout == 0.0:
        return None
    rule = (
        "must be 0: with dropout, sampled, old and new log-probs of the same weights would differ at random"
    )
    return ConfigError("lora.dropout", config.lora.dropout, rule, "0")


def adapter_settings_have_a_rank(config: Config) -> ConfigError | None:
    lora = config.lora
    if lora.rank or (lora.alpha is None and not lora.target_modules):
        return None
    return ConfigError("lora.rank", 0, "must be above 0 for lora.alpha and lora.target_modules to act", "16")


def task_has_one_source(config: Config) -> ConfigError | None:
    name, path = config.task.name, config.task.path
    if name and path:
        return ConfigError("task.name", name, f"excludes task.path = {path!r}; keep one of them", "null")
    if not name and not path:
        return ConfigError("task.name", name, "a task is needed: set task.name or task.path", "word_sorting")
    return None


def task_options_match_its_source(config: Config) -> ConfigError | None:
    task = config.task
    if task.params and not task.name:
        return ConfigError(
            "task.params", dict(task.params), "only a task given by task.name has parameters", "{}"
        )
    if task.eval_path and not task.path:
        return ConfigError(
            "task.eval_path", task.eval_path, "needs task.path; a named task draws its own", "null"
        )
    return None


def evaluation_has_prompts(config: Config) -> ConfigError | None:
    if config.run.eval_every and not config.task.eval_size:
        rule = "evaluates on task.eval_size = 0 held-out prompts, which are none"
        return ConfigError("run.eval_every", config.run.eval_every, rule, "0, or task.eval_size: 64")
    return None


def mini_batches_are_equal(config: Config) -> ConfigError | None:
    mini, prompts = config.batch.mini_batch_prompts, config.batch.num_prompts
    if mini is None or prompts % mini == 0:
        return None
    divisors = [size for size in range(1, prompts + 1) if prompts % size == 0]
    nearest = min(divisors, key=lambda size: abs(size - mini))
    return ConfigError(
        "batch.mini_batch_prompts", mini, f"must divide batch.num_prompts = {prompts}", str(nearest)
    )


def training_samples_at_a_temperature(config: Config) -> ConfigError | None:
    temperature = config.rollout.temperature
    if temperature > 0:
        return None
    rule = "must be above 0 for training: greedy samples have no distribution to take a policy gradient of"
    return ConfigError("rollout.temperature", temperature, rule, "1.0")


def training_samples_the_whole_distribution(config: Config) -> ConfigError | None:
    top_p = config.rollout.top_p
    if top_p == 1.0:
        return None
    rule = (
        "must be 1 for training: samples would come from a truncated distribution and be scored under the full "
        "one, so every importance ratio would be off by the mass cut away"
    )
    return ConfigError("rollout.top_p", top_p, rule, "1.0")


def groups_can_be_compared(config: Config) -> ConfigError | None:
    kind, samples = config.algorithm.advantage, config.batch.num_samples
    if kind not in ("group_norm", "group_center", "leave_one_out") or samples >= 2:
        return None
    rule = f"must be at least 2: advantage {kind} compares the samples of one prompt"
    return ConfigError("batch.num_samples", samples, rule, "2, or algorithm.advantage: batch_whiten")


def dynamic_sampling_can_find_a_difference(config: Config) -> ConfigError | None:
    if config.algorithm.dynamic_sampling and config.batch.num_samples < 2:
        rule = "must be at least 2 with algorithm.dynamic_sampling: one reward always equals itself"
        return ConfigError("batch.num_samples", config.batch.num_samples, rule, "2")
    return None


def overlong_penalty_fits(config: Config) -> ConfigError | None:
    cache, limit = config.algorithm.overlong_cache or 0, config.rollout.max_new_tokens
    if cache <= limit:
        return None
    rule = f"must be at most rollout.max_new_tokens = {limit}"
    return ConfigError("algorithm.overlong_cache", cache, rule, str(limit))


def dual_clip_has_a_clipped_loss(config: Config) -> ConfigError | None:
    algorithm = config.algorithm
    if algorithm.dual_clip is None or algorithm.loss == "clip":
        return None
    rule = f"applies to algorithm.loss: clip only, and the loss is {algorithm.loss}"
    return ConfigError("algorithm.dual_clip", algorithm.dual_clip, rule, "null")


def kl_in_the_reward_has_a_weight(config: Config) -> ConfigError | None:
    algorithm = config.algorithm
    if algorithm.kl_placement == "loss" or algorithm.kl_coefficient > 0:
        return None
    rule = "has no effect with algorithm.kl_coefficient = 0"
    return ConfigError("algorithm.kl_placement", "reward", rule, "loss, or a coefficient above 0")


def old_logprob_source_exists(config: Config) -> ConfigError | None:
    wanted, engine = config.algorithm.old_logprob, config.rollout.engine
    if wanted == "current" and not has_one_update_per_rollout(config):
        rule = (
            "needs exactly one update per rollout: from the second on, the weights are no longer the old ones"
        )
        return ConfigError("algorithm.old_logprob", wanted, rule, decide_old_logprob(config, "auto").source)
    if wanted == "rollout" and engine not in ENGINES_WITH_LOGPROBS:
        rule = f"needs an engine that returns sampled log-probs, and {engine} does not"
        return ConfigError("algorithm.old_logprob", wanted, rule, "recompute")
    return None


def warm_up_ends(config: Config) -> ConfigError | None:
    updates = num_actor_steps(config) * mini_batches_per_rollout(config) * config.batch.num_epochs
    if config.train.warmup_steps <= updates or updates < 1:  # without updates another rule says why
        return None
    rule = f"must be at most the run's {updates} updates, or the learning rate never reaches train.lr"
    return ConfigError("train.warmup_steps", config.train.warmup_steps, rule, str(updates))


def moment_decays_are_below_one(config: Config) -> ConfigError | None:
    for section, betas in (("train", config.train.betas), ("critic", config.critic.betas)):
        if not all(0.0 <= beta < 1.0 for beta in betas):
            rule = "must each be at least 0 and below 1"
            return ConfigError(f"{section}.betas", list(betas), rule, "[0.9, 0.95]")
    return None


def padding_settings_act(config: Config) -> ConfigError | None:
    """A setting of the other layout, or of another width, would do nothing in silence."""
    batch = config.batch
    changed = batch.model_dump(exclude_defaults=True)
    rule = f"has no effect with batch.layout: {batch.layout}"
    if batch.layout == "packed":
        for key in ("pad_to", "buckets_per_doubling", "pad_length", "pad_rows"):
            if key in changed:
                return ConfigError(
                    f"batch.{key}", changed[key], rule, "batch.layout: padded, or leave it out"
                )
    elif batch.pack_multiple > 1:
        return ConfigError("batch.pack_multiple", batch.pack_multiple, rule, "1, or batch.pad_to: bucket")
    if batch.buckets_per_doubling is not None and batch.pad_to != "bucket":
        rule = f"says how many buckets there are, and batch.pad_to is {batch.pad_to}"
        return ConfigError(
            "batch.buckets_per_doubling", batch.buckets_per_doubling, rule, "batch.pad_to: bucket"
        )
    return None


def forced_width_decides_alone(config: Config) -> ConfigError | None:
    """Nothing else has a say in widths beside `pad_length`, and a budget that cannot hold one row is refused."""
    batch, width = config.batch, config.batch.pad_length
    if width is None:
        return None
    nearest = "leave it out, or leave out batch.pad_length"
    if batch.pad_to != "micro_batch":
        rule = f"has nothing to decide: batch.pad_length makes every row {width} tokens wide"
        return ConfigError("batch.pad_to", batch.pad_to, rule, nearest)
    if batch.overlong != "refuse":
        rule = f"has nothing to decide: a sample above batch.pad_length = {width} is an error"
        return ConfigError("batch.overlong", batch.overlong, rule, nearest)
    return budget_problem(config, width, f"batch.pad_length = {width}")


def response_leaves_room_for_a_prompt(config: Config) -> ConfigError | None:
    limit, context = config.rollout.max_new_tokens, config.model.max_context
    if context is None or limit < context:
        return None
    rule = f"must be below model.max_context = {context}, which holds prompt and response"
    return ConfigError("rollout.max_new_tokens", limit, rule, str(max(1, context - 1)))


def budget_holds_the_longest_sample(config: Config) -> ConfigError | None:
    """From the settings alone; `check_lengths` repeats it with the real prompts and the model's context."""
    batch, context, limit = config.batch, config.model.max_context, config.rollout.max_new_tokens
    if batch.overlong != "refuse":
        return None
    if context is not None:
        longest, reason = context, f"model.max_context = {context}"
    else:
        longest, reason = limit + 1, f"one prompt token and rollout.max_new_tokens = {limit}"
    return budget_problem(config, longest, reason)


def budget_problem(config: Config, longest: int, reason: str) -> ConfigError | None:
    """The problem when a sample of `longest` tokens exceeds `batch.pad_length` or a token budget; `reason` says where
    it comes from."""
    batch, critic = config.batch, config.critic
    if batch.pad_length is not None and batch.pad_length < longest:
        rule = f"must hold the longest possible sample, {longest} tokens ({reason})"
        return ConfigError("batch.pad_length", batch.pad_length, rule, str(longest))
    sharing = config.cluster.sequence_parallel_size
    budgets = [
        ("batch.token_budget", batch.token_budget, sharing),
        ("batch.forward_token_budget", batch.forward_token_budget, sharing),
    ]
    if has_critic(config):
        sharing = critic.sequence_parallel_size or sharing
        budgets += [
            ("critic.token_budget", critic.token_budget, sharing),
            ("critic.forward_token_budget", critic.forward_token_budget, sharing),
        ]
    for key, budget, ranks in budgets:
        if budget is not None and budget != AUTO_TOKEN_BUDGET and budget * ranks < longest:
            shared = f" over the {ranks} ranks that share a sequence" if ranks > 1 else ""
            rule = f"must hold the longest possible sample{shared}, {longest} tokens ({reason})"
            nearest = f"{-(-longest // ranks)}, or batch.overlong: own_micro_batch"
            return ConfigError(key, budget, rule, nearest)
    return None


def rollouts_are_recorded_or_replayed(config: Config) -> ConfigError | None:
    if config.rollout.record is None or config.rollout.replay is None:
        return None
    rule = "excludes rollout.record: what is replayed is recorded already"
    return ConfigError("rollout.replay", config.rollout.replay, rule, "leave one of them out")


def ranks_divide_into_axes(config: Config) -> ConfigError | None:
    try:
        for role in ROLES:
            role_sizes(config, role)
    except ConfigError as problem:
        return problem
    return None


def exact_rollouts_can_be_had(config: Config) -> ConfigError | None:
    rollout, cluster = config.rollout, config.cluster
    if not rollout.exact:
        return None
    if rollout.cache == "slots":
        return ConfigError("rollout.cache", "slots", "has no exact decoding (rollout.exact)", "paged")
    sizes = {
        "cluster.tensor_parallel_size": cluster.tensor_parallel_size,
        "cluster.sequence_parallel_size": cluster.sequence_parallel_size,
    }
    for key, size in sizes.items():
        if size > 1:
            return ConfigError(key, size, "cuts the products that rollout.exact keeps whole", "1")
    return None


RULES: tuple[Rule, ...] = (
    exact_rollouts_can_be_had,
    model_is_named,
    run_name_is_one_folder,
    adapters_have_no_dropout,
    adapter_settings_have_a_rank,
    task_has_one_source,
    task_options_match_its_source,
    evaluation_has_prompts,
    mini_batches_are_equal,
    training_samples_at_a_temperature,
    training_samples_the_whole_distribution,
    groups_can_be_compared,
    dynamic_sampling_can_find_a_difference,
    overlong_penalty_fits,
    dual_clip_has_a_clipped_loss,
    kl_in_the_reward_has_a_weight,
    old_logprob_source_exists,
    warm_up_ends,
    moment_decays_are_below_one,
    padding_settings_act,
    forced_width_decides_alone,
    response_leaves_room_for_a_prompt,
    budget_holds_the_longest_sample,
    rollouts_are_recorded_or_replayed,
    ranks_divide_into_axes,
    sft_ignores_no_setting,
    sft_settings_need_sft,
)


SAMPLING_RULES = frozenset({warm_up_ends, response_leaves_room_for_a_prompt, budget_holds_the_longest_sample})
"""Rules about responses and steps of a run that samples; supervised rows are checked once they are read."""


def check_rules(config: Config) -> None:
    """Raises one `ConfigError` with every rule that `config` breaks."""
    rules = [
        rule
        for rule in (*RULES, *CRITIC_RULES, *REWARD_RULES, *AGENT_RULES, *GRADIENT_SYNC_RULES, *ENGINE_RULES)
        if not (is_sft(config) and rule in SAMPLING_RULES)
    ]
    problems = [problem for rule in rules if (problem := rule(config)) is not None]
    if problems:
        raise ConfigError.join(problems)
