"""Rules about token budgets: micro-batches cut by tokens, and the rollout engine's lengths."""

from collections.abc import Iterator

from paceline.adapters.verl.batch_sizes import batch_sizes
from paceline.adapters.verl.defaults import ACTOR, REF, ROLLOUT
from paceline.adapters.verl.findings import GUIDE, LONG_RUN, Hit, Rule, at_least
from paceline.adapters.verl.launch import VerlLaunch

LONG_OUTPUT = 28 * 1024
"""Response length from which the log-prob pass is known to run out of memory at large budgets (30k in the report)."""
SAFE_LOGPROB_BUDGET = 16 * 1024
SMALLEST_LOGPROB_BUDGET = 8 * 1024
TRAINING = f"{ACTOR}.ppo_max_token_len_per_gpu"


def _stages(launch: VerlLaunch) -> Iterator[tuple[str, int, int]]:
    """(key, budget per device, devices per sequence) of the log-prob passes that run with a token budget."""
    stages = [(ROLLOUT, launch.sequence_parallel)]
    if launch.uses_reference:
        stages.append((REF, launch.reference_sequence_parallel))
    for section, parallel in stages:
        key = f"{section}.log_prob_max_token_len_per_gpu"
        budget = launch.integer(key)
        if budget is not None and launch.flag(f"{section}.log_prob_use_dynamic_bsz"):
            yield key, budget, parallel


def training_budget_holds_a_sample(launch: VerlLaunch) -> Iterator[Hit]:
    budget, longest, parallel = launch.integer(TRAINING), launch.longest, launch.sequence_parallel
    if launch.flag(f"{ACTOR}.use_dynamic_bsz") and budget and longest and budget * parallel < longest:
        why = f"{budget} tokens x {parallel} devices per sequence hold no sample of {longest} tokens; verl stops"
        yield Hit(TRAINING, budget, at_least(2 * longest / parallel), why)


def training_budget_holds_two(launch: VerlLaunch) -> Iterator[Hit]:
    budget, longest, parallel = launch.integer(TRAINING), launch.longest, launch.sequence_parallel
    if not launch.flag(f"{ACTOR}.use_dynamic_bsz") or not budget or not longest:
        return
    if not longest <= budget * parallel < 2 * longest:
        return
    suggested = at_least(2 * longest / parallel)
    why = (
        f"less than twice prompt + response ({longest}): a micro-batch often holds one sample, and two only when both "
        "are short. verl's budget is a target, not a bound, so memory must hold more than it says"
    )
    yield Hit(TRAINING, budget, suggested, why, _fewer_micro_batches(launch, suggested * parallel))


def _fewer_micro_batches(launch: VerlLaunch, budget: int) -> str | None:
    sizes = batch_sizes(launch)
    if (
        sizes.micro_batches_per_update is None
        or sizes.mini_batch_samples_per_rank is None
        or launch.longest is None
    ):
        return None
    after = int(-(-sizes.mini_batch_samples_per_rank * launch.longest // budget))
    return f"at full length {after} instead of {sizes.micro_batches_per_update} micro-batches per update"


def forward_budget_holds_a_sample(launch: VerlLaunch) -> Iterator[Hit]:
    longest = launch.longest
    for key, budget, parallel in _stages(launch):
        if longest and budget * parallel < longest and launch.is_set(key):
            why = f"{budget} tokens x {parallel} devices per sequence hold no sample of {longest} tokens; verl stops"
            yield Hit(key, budget, at_least(2 * longest / parallel), why)


def forward_budget_is_larger(launch: VerlLaunch) -> Iterator[Hit]:
    training = launch.integer(TRAINING)
    if training is None or not launch.flag(f"{ACTOR}.use_dynamic_bsz"):
        return
    for key, budget, _ in _stages(launch):
        response = launch.integer("data.max_response_length") or 0
        if budget <= training and response < LONG_OUTPUT:
            why = f"a forward pass keeps no activations: its budget can be above the {training} of training"
            yield Hit(
                key,
                budget,
                2 * training,
                why,
                f"{budget / (2 * training):.2f} x as many passes of this stage",
            )


def critic_budget_is_larger(launch: VerlLaunch) -> Iterator[Hit]:
    if not launch.uses_critic or not launch.flag("critic.use_dynamic_bsz"):
        return
    actor = launch.integer(TRAINING)
    for key in ("critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"):
        budget = launch.integer(key)
        if actor and budget and budget < 2 * actor:
            why = f"a critic has no vocabulary in its last layer: at least twice the actor's {actor}"
            yield Hit(key, budget, 2 * actor, why)


def reward_budget_is_larger(launch: VerlLaunch) -> Iterator[Hit]:
    key = "reward_model.forward_max_token_len_per_gpu"
    if not launch.flag("reward_model.enable") or not launch.flag("reward_model.use_dynamic_bsz"):
        return
    actor, budget = launch.integer(TRAINING), launch.integer(key)
    if actor and budget and budget < 2 * actor:
        why = f"a reward model runs forward only and has one output: at least twice the actor's {actor}"
        yield Hit(key, budget, 2 * actor, why)


def sample_counts_are_no_token_limits(launch: VerlLaunch) -> Iterator[Hit]:
    for section in ("critic", "reward_model"):
        key = f"{section}.forward_micro_batch_size_per_gpu"
        value = launch.integer(key)
        if launch.is_set(key) and value is not None and value >= 1024:
            why = "it counts samples; verl's guide calls it a token limit, which forward_max_token_len_per_gpu is"
            yield Hit(key, value, f"{section}.forward_max_token_len_per_gpu={value}", why)


def logprob_budget_suits_long_output(launch: VerlLaunch) -> Iterator[Hit]:
    response, longest = launch.integer("data.max_response_length") or 0, launch.longest
    if response < LONG_OUTPUT or longest is None:
        return
    for key, budget, parallel in _stages(launch):
        suggested = max(SAFE_LOGPROB_BUDGET, at_least(longest / parallel))
        if budget > suggested:
            why = f"at {response} output tokens this pass is known to run out of memory; {SAFE_LOGPROB_BUDGET} worked"
            yield Hit(key, budget, suggested, why, "peak memory of the pass falls in proportion")
        elif budget < SMALLEST_LOGPROB_BUDGET:
            why = "so few tokens make matrix products too small to be efficient"
            yield Hit(key, budget, suggested, why)


def long_sequences_are_split(launch: VerlLaunch) -> Iterator[Hit]:
    longest = launch.longest
    if longest is None or longest <= 32 * 1024 or launch.sequence_parallel > 1:
        return
    name = "megatron.context_parallel_size" if launch.uses_megatron else "ulysses_sequence_parallel_size"
    why = f"one sample of up to {longest} tokens is on one device; above 32k its activations seldom fit"
    yield Hit(
        f"{ACTOR}.{name}", 1, -(-longest // (32 * 1024)) * 2, why, "activations per device divided by it"
    )


def engine_holds_a_sample(launch: VerlLaunch) -> Iterator[Hit]:
    key, longest = f"{ROLLOUT}.max_model_len", launch.longest
    length = launch.integer(key)
    if length is not None and longest is not None and length < longest:
        why = f"prompt + response may be {longest} tokens; the engine would cut or refuse them"
        yield Hit(key, length, longest, why)


def whole_prompts_fit_without_chunks(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ROLLOUT}.max_num_batched_tokens"
    length = launch.integer(f"{ROLLOUT}.max_model_len") or launch.longest
    batched = launch.integer(key)
    if launch.get(f"{ROLLOUT}.enable_chunked_prefill") is False and batched and length and batched < length:
        why = f"without chunked prefill a prefill must fit whole: the engine refuses less than its length {length}"
        yield Hit(key, batched, f"{at_least(length)}, or {ROLLOUT}.enable_chunked_prefill=True", why)


RULES = (
    Rule(
        "tokens/training-holds-sample",
        "error",
        "B2",
        "verl sequence balancing",
        training_budget_holds_a_sample,
    ),
    Rule(
        "tokens/training-twice",
        "warning",
        "B2",
        f"{GUIDE}, dynamic batch size, tip 1",
        training_budget_holds_two,
    ),
    Rule(
        "tokens/forward-holds-sample", "error", "B2", "verl sequence balancing", forward_budget_holds_a_sample
    ),
    Rule(
        "tokens/forward-larger",
        "advice",
        "B2",
        f"{GUIDE}, dynamic batch size, tip 2",
        forward_budget_is_larger,
    ),
    Rule(
        "tokens/critic-twice", "advice", "B2", f"{GUIDE}, dynamic batch size, tip 3", critic_budget_is_larger
    ),
    Rule(
        "tokens/reward-twice", "advice", "B2", f"{GUIDE}, dynamic batch size, tip 3", reward_budget_is_larger
    ),
    Rule(
        "tokens/sample-count-as-limit",
        "warning",
        "B2",
        f"{GUIDE}, dynamic batch size (its slip)",
        sample_counts_are_no_token_limits,
    ),
    Rule(
        "tokens/logprob-long-output",
        "warning",
        "D3",
        f"{LONG_RUN}, section 4",
        logprob_budget_suits_long_output,
    ),
    Rule("tokens/long-sequence", "warning", "B4", f"{GUIDE}, Ulysses", long_sequences_are_split),
    Rule("tokens/model-length", "error", "B11", "vLLM engine arguments", engine_holds_a_sample),
    Rule(
        "tokens/unchunked-prefill", "error", "B11", "vLLM engine arguments", whole_prompts_fit_without_chunks
    ),
)
