"""Rules about batch sizes: normalisation, divisibility, deprecated names."""

from collections.abc import Iterable, Iterator

from paceline.adapters.verl.batch_sizes import batch_sizes
from paceline.adapters.verl.defaults import ACTOR, REF, ROLLOUT
from paceline.adapters.verl.findings import GUIDE, LONG_RUN, Hit, Rule, nearest_divisor
from paceline.adapters.verl.launch import VerlLaunch

GLOBAL_SIZES = (
    f"{ACTOR}.ppo_micro_batch_size",
    f"{REF}.log_prob_micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size",
    "critic.ppo_micro_batch_size",
    "critic.forward_micro_batch_size",
    "reward_model.micro_batch_size",
)
TRAIN = "data.train_batch_size"
MINI = f"{ACTOR}.ppo_mini_batch_size"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"


def mini_batch_fits_the_batch(launch: VerlLaunch) -> Iterable[Hit]:
    train, mini = launch.integer(TRAIN), launch.integer(MINI)
    if train is not None and mini is not None and mini > train:
        why = f"an update takes {mini} prompts and a step brings {train}; verl stops at the start"
        yield Hit(MINI, mini, train, why)


def mini_batch_divides_the_batch(launch: VerlLaunch) -> Iterable[Hit]:
    train, mini = launch.integer(TRAIN), launch.integer(MINI)
    if train is None or mini is None or not 0 < mini <= train or train % mini == 0:
        return
    why = f"{train} prompts leave {train % mini} for a last, smaller update that weighs as much as the others"
    yield Hit(MINI, mini, nearest_divisor(mini, train), why)


def samples_divide_over_ranks(launch: VerlLaunch) -> Iterable[Hit]:
    sizes = batch_sizes(launch)
    if (
        sizes.samples_per_step is None
        or not sizes.data_parallel
        or sizes.samples_per_step % sizes.data_parallel == 0
    ):
        return
    n, ranks = sizes.samples_per_prompt or 1, sizes.data_parallel
    train = sizes.prompts_per_step or 0
    fitting = next(size for size in range(train, train + ranks + 1) if size * n % ranks == 0)
    consequence = (
        "V1 fills up with padding rows, which are computed and counted in perf/throughput"
        if launch.is_v1
        else "the legacy trainer stops with a chunk size error"
    )
    why = f"{sizes.samples_per_step} samples do not divide over {ranks} data-parallel ranks; {consequence}"
    yield Hit(TRAIN, train, fitting, why)


def mini_batch_divides_over_ranks(launch: VerlLaunch) -> Iterable[Hit]:
    sizes = batch_sizes(launch)
    samples, ranks = sizes.mini_batch_samples, sizes.data_parallel
    if samples is None or not ranks or samples % ranks == 0:
        return
    n, mini = sizes.samples_per_prompt or 1, sizes.mini_batch_prompts or 0
    fitting = next(size for size in range(mini, mini + ranks + 1) if size * n % ranks == 0)
    why = (
        f"normalised per rank it is {samples} samples / {ranks} ranks = {samples / ranks:.2f}, which verl rounds "
        f"down to {samples // ranks}: the update is not the size that was asked for"
    )
    yield Hit(MINI, mini, fitting, why)


def micro_batch_divides_the_mini_batch(launch: VerlLaunch) -> Iterable[Hit]:
    sizes = batch_sizes(launch)
    micro, per_rank = sizes.micro_batch_samples, sizes.mini_batch_samples_per_rank
    if not micro or per_rank is None or int(per_rank) % micro == 0:
        return
    suggested = nearest_divisor(micro, int(per_rank)) if per_rank >= 1 else 1
    why = f"a rank has {int(per_rank)} samples per update, and micro-batches of {micro} do not divide them"
    yield Hit(MICRO, micro, suggested, why)


def sizes_are_per_device(launch: VerlLaunch) -> Iterator[Hit]:
    ranks = batch_sizes(launch).data_parallel
    for key in GLOBAL_SIZES:
        value = launch.integer(key)
        if value is None or not launch.is_set(key):
            continue
        per_device = max(1, value // ranks) if ranks else "value / data-parallel ranks"
        why = f"deprecated: a global size that verl divides by the ranks; {key}_per_gpu means the same on any cluster"
        yield Hit(key, value, f"{key}_per_gpu={per_device}", why)


def only_one_micro_size_is_set(launch: VerlLaunch) -> Iterator[Hit]:
    for key in GLOBAL_SIZES:
        if launch.integer(key) is not None and launch.is_set(key) and launch.is_set(f"{key}_per_gpu"):
            yield Hit(
                key, launch.get(key), f"~{key}", f"verl refuses it together with {key}_per_gpu; keep that one"
            )


def some_micro_size_is_set(launch: VerlLaunch) -> Iterator[Hit]:
    stages = [(ACTOR, "ppo_micro_batch_size", f"{ACTOR}.use_dynamic_bsz")]
    if launch.uses_reference:
        stages.append((REF, "log_prob_micro_batch_size", f"{REF}.log_prob_use_dynamic_bsz"))
    stages.append((ROLLOUT, "log_prob_micro_batch_size", f"{ROLLOUT}.log_prob_use_dynamic_bsz"))
    if launch.uses_critic:
        stages.append(("critic", "ppo_micro_batch_size", "critic.use_dynamic_bsz"))
    for section, name, dynamic in stages:
        key = f"{section}.{name}_per_gpu"
        if not launch.flag(dynamic) and launch.get(key) is None and launch.get(f"{section}.{name}") is None:
            why = f"neither it nor {dynamic} is set, and verl has no default; it stops at the start"
            yield Hit(key, None, f"{dynamic}=True, or {key}=4", why)


def forward_passes_take_more(launch: VerlLaunch) -> Iterator[Hit]:
    micro = launch.integer(MICRO)
    if micro is None or launch.flag(f"{ACTOR}.use_dynamic_bsz"):
        return
    for key in (f"{REF}.log_prob_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"):
        value = launch.integer(key)
        if value is not None and launch.is_set(key) and value < 2 * micro:
            why = f"a forward pass keeps no activations: it can take at least twice the {micro} samples of training"
            yield Hit(key, value, 2 * micro, why, f"{value / (2 * micro):.2f} x as many passes of this stage")


def critic_takes_more(launch: VerlLaunch) -> Iterator[Hit]:
    key = "critic.ppo_micro_batch_size_per_gpu"
    micro, critic = launch.integer(MICRO), launch.integer(key)
    if not launch.uses_critic or micro is None or critic is None or launch.flag("critic.use_dynamic_bsz"):
        return
    if critic < 2 * micro:
        why = "a critic's last layer has one output instead of a vocabulary: it can take more samples than the actor"
        yield Hit(key, critic, 2 * micro, why, f"{critic / (2 * micro):.2f} x as many passes of the critic")


def micro_batches_are_cut_by_tokens(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ACTOR}.use_dynamic_bsz"
    if launch.flag(key):
        return
    longest = launch.longest
    budget = f" {ACTOR}.ppo_max_token_len_per_gpu={2 * longest}" if longest else ""
    why = "a fixed number of samples makes micro-batches of uneven length; cut by tokens, they are even"
    yield Hit(key, False, f"True{budget}", why)


def ranks_get_equal_work(launch: VerlLaunch) -> Iterator[Hit]:
    key = "trainer.balance_batch"
    if launch.get(key) is False and not (launch.is_set("trainer.use_v1") and launch.is_v1):
        why = "samples are not spread by length: the rank with the longest ones makes the others wait (not in V1)"
        yield Hit(key, False, True, why)


def separate_schedule_batches_match(launch: VerlLaunch) -> Iterator[Hit]:
    if "separate" not in str(launch.get("trainer.v1.trainer_mode")):
        return
    steps = launch.integer("trainer.v1.separate_async.parameter_sync_step")
    train, mini = launch.integer(TRAIN), launch.integer(MINI)
    if steps and train and mini and train != steps * mini:
        why = f"separate_async wants parameter_sync_step x ppo_mini_batch_size = {steps} x {mini} = {steps * mini}"
        yield Hit(TRAIN, train, steps * mini, why)


def groups_have_members(launch: VerlLaunch) -> Iterator[Hit]:
    estimator = str(launch.get("algorithm.adv_estimator"))
    grouped = ("grpo", "rloo", "opo", "gpg", "gdpo", "optimal_token_baseline", "reinforce_plus_plus_baseline")
    if estimator.startswith(grouped) and launch.integer(f"{ROLLOUT}.n") == 1:
        why = f"{estimator} compares the samples of one prompt, and there is one: every advantage is 0 or undefined"
        yield Hit(f"{ROLLOUT}.n", 1, 8, why)


RULES = (
    Rule("batch/mini-within-batch", "error", "B2", "verl#3095", mini_batch_fits_the_batch),
    Rule("batch/mini-divides-batch", "warning", "B2", "verl#3095", mini_batch_divides_the_batch),
    Rule(
        "batch/samples-divide-ranks",
        "warning",
        "D2",
        f"verl#3095; {LONG_RUN}, section 4",
        samples_divide_over_ranks,
    ),
    Rule(
        "batch/mini-divides-ranks",
        "error",
        "B2",
        f"{GUIDE}, batch sizes (normalisation)",
        mini_batch_divides_over_ranks,
    ),
    Rule(
        "batch/micro-divides-mini",
        "error",
        "B2",
        f"{GUIDE}, batch sizes (normalisation)",
        micro_batch_divides_the_mini_batch,
    ),
    Rule("batch/global-micro-size", "warning", "B2", f"{GUIDE}, batch sizes (note)", sizes_are_per_device),
    Rule("batch/two-micro-sizes", "error", "B2", f"{GUIDE}, batch sizes (note)", only_one_micro_size_is_set),
    Rule("batch/no-micro-size", "error", "B2", f"{GUIDE}, batch sizes", some_micro_size_is_set),
    Rule("batch/forward-micro", "advice", "B2", f"{GUIDE}, batch sizes, tip 3", forward_passes_take_more),
    Rule("batch/critic-micro", "advice", "B2", f"{GUIDE}, batch sizes, tip 4", critic_takes_more),
    Rule(
        "batch/dynamic-off", "warning", "B2", f"{GUIDE}, dynamic batch size", micro_batches_are_cut_by_tokens
    ),
    Rule("batch/unbalanced-ranks", "warning", "B2", "trainer.balance_batch", ranks_get_equal_work),
    Rule(
        "batch/separate-async-size",
        "error",
        "C3",
        "V1 trainer, separate_async",
        separate_schedule_batches_match,
    ),
    Rule("batch/single-sample-groups", "error", "A9", "group-relative advantages", groups_have_members),
)
