"""Rules about padding, passes nobody needs, the Ascend platform, and the run around the training."""

from collections.abc import Iterator

from paceline.adapters.verl.batch_sizes import batch_sizes
from paceline.adapters.verl.defaults import ACTOR, MODEL, REF, ROLLOUT
from paceline.adapters.verl.findings import ASCEND, GUIDE, LONG_RUN, Hit, Rule
from paceline.adapters.verl.launch import VerlLaunch

OVERRIDE = f"{ACTOR}.megatron.override_transformer_config"
FUSED = ("use_fused_rmsnorm", "use_fused_swiglu", "apply_rope_fusion", "use_fused_rotary_pos_emb")
FREQUENT = 5
"""Saving or testing more often than every so many steps is asked about."""


def rows_are_packed(launch: VerlLaunch) -> Iterator[Hit]:
    keys = [f"{ACTOR}.megatron.use_remove_padding" if launch.uses_megatron else f"{MODEL}.use_remove_padding"]
    if launch.uses_critic and not launch.uses_megatron:
        keys.append("critic.model.use_remove_padding")
    for key in keys:
        if launch.get(key) is False:
            yield Hit(
                key,
                False,
                True,
                "padding is computed like tokens: up to longest / mean length times the work",
            )


def padded_rows_are_not_widened(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ACTOR}.megatron.pad_bshd_to_minibatch_max"
    unpacked = launch.uses_megatron and launch.get(f"{ACTOR}.megatron.use_remove_padding") is False
    if unpacked and launch.flag(f"{ACTOR}.use_dynamic_bsz") and launch.flag(key):
        why = "micro-batches cut by tokens are widened to the mini-batch's longest sample, past their budget"
        effect = "micro-batches of 14,010 and 512 tokens become 28,020 slots (1.93 x)"
        yield Hit(key, True, f"False, or {ACTOR}.megatron.use_remove_padding=True", why, effect)


def reference_is_used(launch: VerlLaunch) -> Iterator[Hit]:
    pairs = (
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
    )
    for key, coefficient in pairs:
        if launch.flag(key) and launch.number(coefficient) == 0:
            why = f"{coefficient} is 0: the reference log-probs are computed and multiplied by nothing"
            yield Hit(key, True, False, why, "the whole stage ref, if nothing else needs it")


def old_logprobs_are_needed(launch: VerlLaunch) -> Iterator[Hit]:
    key, updates = "algorithm.rollout_correction.bypass_mode", batch_sizes(launch).updates_per_step
    if updates == 1 and not launch.flag(key) and not launch.flag("algorithm.use_kl_in_reward"):
        why = (
            "one update per rollout: the ratio to the old log-probs is 1, so the pass buys nothing. Bypass takes the "
            "engine's log-probs instead, which differ by its numerics: watch training/rollout_probs_diff_*"
        )
        effect = "the stage old_log_prob, about a third of update_actor's compute"
        yield Hit(key, False, f"True, with {ROLLOUT}.calculate_log_probs=True", why, effect)


def liger_is_tried(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{MODEL}.use_liger"
    if not launch.uses_megatron and not launch.is_ascend and not launch.flag(key):
        yield Hit(
            key, False, True, "fused RMSNorm, SwiGLU and RoPE; works for RL too, beside use_fused_kernels"
        )


def task_queue_suits_graphs(launch: VerlLaunch) -> Iterator[Hit]:
    level = launch.environment.get("TASK_QUEUE_ENABLE")
    if level == "2" and not launch.flag(f"{ROLLOUT}.enforce_eager"):
        why = "level 2 and graph mode (enforce_eager=False) exclude one another by verl's own documentation"
        yield Hit("TASK_QUEUE_ENABLE", 2, f"1, or {ROLLOUT}.enforce_eager=True", why)


def task_queue_is_on(launch: VerlLaunch) -> Iterator[Hit]:
    if launch.environment.get("TASK_QUEUE_ENABLE") == "0":
        yield Hit(
            "TASK_QUEUE_ENABLE",
            0,
            1,
            "operators are dispatched one by one, and the device waits for the host",
        )


def allocator_is_jemalloc(launch: VerlLaunch) -> Iterator[Hit]:
    preload = launch.environment.get("LD_PRELOAD", "")
    if launch.is_ascend and "jemalloc" not in preload:
        why = "on ARM hosts jemalloc fragments less; on x86 it makes no difference"
        yield Hit("LD_PRELOAD", preload or None, "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2", why)


def attention_is_flash_on_ascend(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{OVERRIDE}.use_flash_attn"
    if launch.is_ascend and launch.uses_megatron and not launch.flag(key):
        yield Hit(
            key, launch.get(key), f"+{key}=True", "MindSpeed's flash attention must be switched on by name"
        )


def operators_are_fused_on_ascend(launch: VerlLaunch) -> Iterator[Hit]:
    if not launch.is_ascend or not launch.uses_megatron:
        return
    experts = (launch.integer(f"{ACTOR}.megatron.expert_model_parallel_size") or 1) > 1
    wanted = (
        *FUSED,
        *(["moe_grouped_gemm"] if experts or (launch.model and launch.model.num_experts) else []),
    )
    for name in wanted:
        key = f"{OVERRIDE}.{name}"
        if not launch.flag(key):
            effect = (
                "RoPE 86 to 24 us per layer, 0.5 % of the step"
                if "rope" in name or "rotary" in name
                else None
            )
            yield Hit(key, launch.get(key), f"+{key}=True", "several operators become one", effect)


def optimizer_is_distributed_on_ascend(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{OVERRIDE}.use_distributed_optimizer"
    if launch.is_ascend and launch.uses_megatron and not launch.flag(key):
        why = "MindSpeed takes it from the override block; Megatron's own key alone does not reach it"
        yield Hit(
            key, launch.get(key), f"+{key}=True", why, "optimiser states divided over data-parallel ranks"
        )


def loader_has_workers(launch: VerlLaunch) -> Iterator[Hit]:
    key = "data.dataloader_num_workers"
    workers = launch.integer(key)
    if workers is not None and workers < 2:
        yield Hit(key, workers, 8, "prompts are read and tokenised while the devices wait")


def saving_is_rare(launch: VerlLaunch) -> Iterator[Hit]:
    key = "trainer.save_freq"
    every = launch.integer(key)
    if every is not None and 0 < every < FREQUENT:
        yield Hit(
            key, every, 20, "step includes the time to save; every save stops all devices", _save_share(every)
        )


def _save_share(every: int) -> str:
    return f"the time of one save divided by {every} on every step"


def something_is_saved(launch: VerlLaunch) -> Iterator[Hit]:
    key = "trainer.save_freq"
    every = launch.integer(key)
    if every is not None and every <= 0:
        yield Hit(key, every, 50, "nothing is saved: a crash loses the run")


def saving_is_asynchronous(launch: VerlLaunch) -> Iterator[Hit]:
    key, every = f"{ACTOR}.checkpoint.async_save", launch.integer("trainer.save_freq")
    if launch.uses_megatron and every and every > 0 and not launch.flag(key):
        yield Hit(
            key, False, True, "the step waits until the checkpoint is written (Megatron can write meanwhile)"
        )


def testing_is_rare(launch: VerlLaunch) -> Iterator[Hit]:
    key = "trainer.test_freq"
    every = launch.integer(key)
    if every is not None and 0 < every < FREQUENT:
        why = "a validation generates for every held-out prompt, and timing_s/step does not count it"
        yield Hit(key, every, 20, why)


def entry_point_exists(launch: VerlLaunch) -> Iterator[Hit]:
    if "async_main_ppo" in launch.entry:
        why = "named in verl's documentation, and in no release"
        yield Hit("entry", launch.entry, "verl.experimental.one_step_off_policy.main_ppo", why)


def launch_is_in_one_piece(launch: VerlLaunch) -> Iterator[Hit]:
    for command in launch.stray:
        first = command.arguments[0]
        lost = next(one for one in command.arguments if "." in one and "=" in one)
        if first == "tee":
            why = f"line {command.line}: settings after the pipe are file names for tee and reach nobody"
            yield Hit(lost.partition("=")[0], lost, "put them before the pipe", why)
            continue
        why = (
            f"line {command.line} begins with a setting: the line before has no backslash at its very end, or is a "
            "comment, so the launch ends there and these settings reach nobody"
        )
        yield Hit(
            command.arguments[0].partition("=")[0], " ".join(command.arguments)[:80], "join the lines", why
        )


def settings_are_given_once(launch: VerlLaunch) -> Iterator[Hit]:
    values: dict[str, list[str]] = {}
    for override in launch.overrides:
        if override.prefix != "~":
            values.setdefault(override.key, []).append(override.text)
    for key, texts in values.items():
        if len(set(texts)) > 1:
            yield Hit(
                key, ", then ".join(texts), texts[-1], "it is given more than once, and the last one wins"
            )


def log_survives_a_resume(launch: VerlLaunch) -> Iterator[Hit]:
    loggers = launch.get("trainer.logger")
    names = loggers if isinstance(loggers, list) else [loggers]
    if "file" in names and launch.get("trainer.resume_mode") != "disable":
        why = "the file logger opens its file anew: resuming a run erases what it has logged"
        yield Hit("trainer.logger", loggers, "a VERL_FILE_LOGGER_PATH of its own for every start", why)


def transfer_queue_is_as_said(launch: VerlLaunch) -> Iterator[Hit]:
    key = "transfer_queue.enable"
    if launch.is_v1 and launch.is_set(key) and not launch.flag(key):
        yield Hit(
            key, False, "trainer.use_v1=False", "has no effect: the V1 trainer switches the transfer queue on"
        )


def reference_key_is_the_actors(launch: VerlLaunch) -> Iterator[Hit]:
    actor, ref = f"{ACTOR}.ulysses_sequence_parallel_size", f"{REF}.ulysses_sequence_parallel_size"
    long = (launch.longest or 0) > 32 * 1024
    if launch.uses_reference and long and not launch.uses_megatron and launch.sequence_parallel > 1:
        size = launch.integer(ref) or 1
        if size == 1 and launch.is_set(ref):
            why = f"the actor splits samples over {launch.integer(actor)} devices and the reference model does not"
            yield Hit(ref, size, launch.integer(actor), why)


def clip_range_is_the_one_asked_for(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ACTOR}.clip_ratio"
    sides = [f"{key}_low", f"{key}_high"]
    value = launch.number(key)
    if launch.is_set(key) and value is not None and not all(launch.is_set(side) for side in sides):
        in_force = [launch.number(side) for side in sides]
        if in_force != [value, value]:
            why = f"has no effect: clip_ratio_low and clip_ratio_high have defaults of their own, {in_force}, that win"
            yield Hit(key, value, f"{sides[0]}={value} {sides[1]}={value}", why)


RULES = (
    Rule("padding/unpacked", "warning", "B1", f"{GUIDE}, remove padding", rows_are_packed),
    Rule("padding/widened", "warning", "B3", "verl#6901, verl#7521", padded_rows_are_not_widened),
    Rule("passes/unused-reference", "warning", "A1", "verl KL settings", reference_is_used),
    Rule(
        "passes/old-logprob", "advice", "A1", "verl rollout correction, bypass mode", old_logprobs_are_needed
    ),
    Rule("algorithm/clip-ratio", "error", "A9", "verl actor config", clip_range_is_the_one_asked_for),
    Rule("kernels/liger", "advice", "B7", f"{GUIDE}, Liger", liger_is_tried),
    Rule("ascend/task-queue-graphs", "error", "D2", f"{ASCEND}, graph mode", task_queue_suits_graphs),
    Rule("ascend/task-queue-off", "warning", "D2", f"{ASCEND}, dispatch", task_queue_is_on),
    Rule("ascend/jemalloc", "advice", "D2", f"{LONG_RUN}, section 3.1.2", allocator_is_jemalloc),
    Rule("ascend/flash-attention", "error", "D2", f"{ASCEND}, fused operators", attention_is_flash_on_ascend),
    Rule(
        "ascend/fused-operators", "warning", "D2", f"{LONG_RUN}, section 3.3.1", operators_are_fused_on_ascend
    ),
    Rule(
        "ascend/distributed-optimizer",
        "warning",
        "D2",
        f"{LONG_RUN}, section 3.3.2",
        optimizer_is_distributed_on_ascend,
    ),
    Rule("data/workers", "warning", "A9", "go-live checklist", loader_has_workers),
    Rule("checkpoint/too-often", "warning", "A9", "go-live checklist", saving_is_rare),
    Rule("checkpoint/never", "advice", "C6", "go-live checklist", something_is_saved),
    Rule("checkpoint/blocking", "advice", "C6", "verl checkpoint config", saving_is_asynchronous),
    Rule("eval/too-often", "advice", "A9", "go-live checklist", testing_is_rare),
    Rule("launch/entry-point", "error", "C2", "verl one-step-off documentation", entry_point_exists),
    Rule("launch/cut-in-two", "error", "A9", "shell line continuation", launch_is_in_one_piece),
    Rule("launch/set-twice", "warning", "A9", "Hydra's override order", settings_are_given_once),
    Rule("logging/erased-by-resume", "advice", "A9", "verl file logger", log_survives_a_resume),
    Rule("launch/transfer-queue", "advice", "C4", "verl V1 trainer", transfer_queue_is_as_said),
    Rule("parallel/reference-unsplit", "warning", "B4", f"{GUIDE}, Ulysses", reference_key_is_the_actors),
)
