"""Batch, model, task, rollout, optimiser, run and devices of a launch in paceline's words."""

import json
import re
from pathlib import PurePath
from typing import Any

from paceline.adapters.verl.batch_sizes import micro_batch_per_device
from paceline.adapters.verl.defaults import ACTOR, MODEL, REF, ROLLOUT
from paceline.adapters.verl.translation_state import Translator
from paceline.config.engine_schema import VllmSection

VLLM_KEYS = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    **{
        name: name
        for name in (
            *("gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs", "enforce_eager"),
            *("enable_chunked_prefill", "enable_prefix_caching", "cudagraph_capture_sizes"),
        )
    },
}
"""verl's settings of vLLM, and their names in section `rollout.vllm`."""

_SCHEDULES = {"constant": "constant", "cosine": "cosine"}


def translate_batch(state: Translator) -> None:
    """Section `batch`."""
    state.copy("data.train_batch_size", "batch.num_prompts")
    state.copy(f"{ROLLOUT}.n", "batch.num_samples")
    mini, train = state.take(f"{ACTOR}.ppo_mini_batch_size"), state.launch.get("data.train_batch_size")
    state.put("batch.mini_batch_prompts", mini if mini != train else None)
    state.copy(f"{ACTOR}.ppo_epochs", "batch.num_epochs")
    state.put("batch.token_budget", _training_budget(state))
    _forward_budget(state)
    _layout(state)


def _training_budget(state: Translator) -> int | None:
    launch, longest = state.launch, state.launch.longest
    is_dynamic = state.take(f"{ACTOR}.use_dynamic_bsz") is True
    budget = state.take(f"{ACTOR}.ppo_max_token_len_per_gpu")
    for name in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"):
        state.take(f"{ACTOR}.{name}")
    if not is_dynamic:
        micro = micro_batch_per_device(launch, launch.num_devices)
        if micro is None or longest is None:
            return None
        state.differs.append(
            f"micro-batches of {micro} samples become batch.token_budget = {micro * longest}: as many at full "
            "length, more when they are short"
        )
        return micro * longest
    if not isinstance(budget, int):
        return None
    if longest is not None and budget * launch.sequence_parallel < longest:
        state.differs.append(
            f"batch.token_budget is raised from {budget}: a strict bound here, and a sample may have {longest} tokens"
        )
        return -(-longest // launch.sequence_parallel)
    return budget


def _forward_budget(state: Translator) -> None:
    budgets = []
    for section in (ROLLOUT, *([REF] if state.launch.uses_reference else [])):
        key = f"{section}.log_prob_max_token_len_per_gpu"
        if state.take(f"{section}.log_prob_use_dynamic_bsz") is True and state.launch.is_set(key):
            budgets.append(state.take(key))
    budgets = [budget for budget in budgets if isinstance(budget, int)]
    for section in (ROLLOUT, REF):
        for name in ("micro_batch_size_per_gpu", "micro_batch_size", "max_token_len_per_gpu"):
            state.take(f"{section}.log_prob_{name}")
    if budgets:
        least = -(-(state.launch.longest or 0) // state.launch.sequence_parallel)
        state.put("batch.forward_token_budget", max(min(budgets), least))
        if len(set(budgets)) > 1:
            state.differs.append(
                "old and reference log-probs share batch.forward_token_budget; the smaller is taken"
            )


def _layout(state: Translator) -> None:
    packed = state.take(f"{MODEL}.use_remove_padding")
    megatron = state.take(f"{ACTOR}.megatron.use_remove_padding")
    if (megatron if state.launch.uses_megatron else packed) is False:
        state.put("batch.layout", "padded")
        if state.take(f"{ACTOR}.megatron.pad_bshd_to_minibatch_max") is True and state.launch.uses_megatron:
            state.put("batch.pad_to", "mini_batch")


def translate_rest(state: Translator) -> None:
    """Sections `model`, `lora`, `task`, `rollout`, `train`, `run`, `checkpoint`, `telemetry`."""
    _model(state)
    _task(state)
    _rollout(state)
    _optimizer(state)
    _run(state)


def _model(state: Translator) -> None:
    state.copy(f"{MODEL}.path", "model.path")
    state.copy(f"{MODEL}.tokenizer_path", "model.tokenizer_path")
    trusts = [state.take(f"{section}.trust_remote_code") for section in (MODEL, "data")]
    state.put("model.trust_remote_code", True in trusts)
    state.put("model.max_context", state.launch.longest)
    recomputes = state.take(f"{MODEL}.enable_gradient_checkpointing")
    megatron = state.take(f"{ACTOR}.megatron.override_transformer_config.recompute_granularity")
    for name in ("recompute_method", "recompute_num_layers", "recompute_modules"):
        state.take(f"{ACTOR}.megatron.override_transformer_config.{name}")
    if state.launch.uses_megatron:
        recomputes = megatron == "full"
        if megatron == "selective":
            state.put("train.gradient_checkpointing", "selective")
    if recomputes is True:
        state.put("train.gradient_checkpointing", "all")
    state.copy(f"{MODEL}.enable_activation_offload", "train.activation_offload")
    engine = "megatron" if state.launch.uses_megatron else "fsdp_config"
    state.put("train.optimizer_offload", state.take(f"{ACTOR}.{engine}.optimizer_offload"))
    if state.launch.uses_reference:  # the actor's own weights stay on the device here
        state.put("train.param_offload", state.take(f"{REF}.{engine}.param_offload"))
    rank = state.take(f"{MODEL}.lora_rank")
    alpha, targets = state.take(f"{MODEL}.lora_alpha"), state.take(f"{MODEL}.target_modules")
    if isinstance(rank, int) and rank > 0:
        state.put("lora.rank", rank)
        state.put("lora.alpha", float(16 if alpha is None else alpha))
        state.put("lora.target_modules", targets if isinstance(targets, list) else None)


def _task(state: Translator) -> None:
    _files(state, "data.train_files", "task.path")
    _files(state, "data.val_files", "task.eval_path")
    if state.launch.get("data.val_files") is None and state.launch.is_set("data.train_files"):
        state.put("task.eval_size", 0)
    state.copy("data.prompt_key", "task.prompt_key")
    state.put("task.answer_key", "reward_model.ground_truth")
    state.copy("data.shuffle", "task.shuffle")
    state.put("run.seed", state.take("data.seed"))
    if state.take("data.filter_overlong_prompts") is True:
        state.put("task.overlong_prompts", "drop")
    if state.take("data.truncation") not in ("error", None):
        state.missing["data.truncation"] = (
            "prompts are never cut: too long ones are refused, or dropped and counted"
        )
    state.take("data.max_prompt_length")
    state.copy(f"{ROLLOUT}.val_kwargs.temperature", "task.eval_temperature")
    state.copy(f"{ROLLOUT}.val_kwargs.n", "task.eval_samples")
    state.take(f"{ROLLOUT}.val_kwargs.do_sample")
    _reward(state)


def _files(state: Translator, key: str, name: str) -> None:
    files = state.take(key)
    if isinstance(files, list):
        if len(files) > 1:
            state.missing[key] = (
                f"{len(files)} files; put them into one folder and name that. The recipe has the first"
            )
        files = files[0] if files else None
    state.put(name, files)


def _reward(state: Translator) -> None:
    if state.take("reward_model.enable") is True:
        _reward_model(state)
        return
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        path, function = state.take(f"{prefix}.path"), state.take(f"{prefix}.name")
        if isinstance(path, str):
            module = PurePath(path).stem
            state.put("task.reward", f"{module}:{function or 'compute_score'}")
            state.differs.append(
                f"the reward {path} must be importable as {module} and take (completion, *, answer, metadata, prompt) "
                "instead of verl's (data_source, solution_str, ground_truth, extra_info)"
            )
            return
    state.differs.append(
        "verl picks the reward by each row's data_source; name one in task.reward (here: exact_match)"
    )


def _reward_model(state: Translator) -> None:
    path = state.take("reward_model.model.path")
    if not isinstance(path, str):
        state.missing["reward_model.enable"] = (
            "its model's path is not in the launch; name one in reward.sources"
        )
        return
    source: dict[str, Any] = {"kind": "model", "path": path}
    if state.take("reward_model.use_dynamic_bsz") is True:
        source["token_budget"] = state.take("reward_model.forward_max_token_len_per_gpu")
    if state.take("reward_model.model.trust_remote_code") is True:
        source["trust_remote_code"] = True
    state.put("reward.sources", {"model": source})


def _rollout(state: Translator) -> None:
    for key in (f"{ROLLOUT}.response_length", "data.max_response_length"):
        state.take(key)
    state.put("rollout.max_new_tokens", state.launch.integer("data.max_response_length"))
    state.put("rollout.temperature", _float(state.take(f"{ROLLOUT}.temperature")))
    state.put("rollout.top_p", _float(state.take(f"{ROLLOUT}.top_p")))
    state.copy(f"{ROLLOUT}.ignore_eos", "rollout.ignore_eos")
    if state.launch.is_set(f"{ROLLOUT}.max_num_seqs"):
        state.copy(f"{ROLLOUT}.max_num_seqs", "rollout.max_running")
    _engine(state)
    if state.take(f"{ROLLOUT}.top_k") not in (-1, 0, None):
        state.missing[f"{ROLLOUT}.top_k"] = "training samples the whole distribution"


def _engine(state: Translator) -> None:
    """The recipe generates with the native engine; of vLLM's settings it is said how to have vLLM with them here."""
    engine = state.take(f"{ROLLOUT}.name")
    settings = []
    for key, name in VLLM_KEYS.items():
        if engine == "vllm" and state.launch.is_set(f"{ROLLOUT}.{key}"):
            value = state.take(f"{ROLLOUT}.{key}")
            if value != VllmSection.model_fields[name].default:
                settings.append(f"rollout.vllm.{name}={json.dumps(value, separators=(',', ':'))}")
    if engine is None:
        return
    said = f"{engine} generates there; here the native engine does, on the trainer's own weights"
    if engine == "vllm":
        wanted = " ".join(["rollout.engine=vllm", *settings])
        said += f" (vLLM, with what the launch sets: {wanted})"
    state.differs.append(said)


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _optimizer(state: Translator) -> None:
    optim = f"{ACTOR}.optim"
    state.put("train.lr", _float(state.take(f"{optim}.lr")))
    schedules = [
        state.take(f"{optim}.{name}") for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")
    ]
    schedule = next((one for one in reversed(schedules) if one is not None), "constant")
    if schedule in _SCHEDULES:
        state.put("train.lr_schedule", _SCHEDULES[schedule])
    else:
        state.missing[f"{optim}.lr_scheduler_type"] = f"{schedule}: no such schedule here"
    warmup = state.take(f"{optim}.lr_warmup_steps")
    if isinstance(warmup, int) and warmup > 0:
        state.put("train.warmup_steps", warmup)
    elif state.take(f"{optim}.lr_warmup_steps_ratio"):
        state.missing[f"{optim}.lr_warmup_steps_ratio"] = (
            "a share of an unknown number; set train.warmup_steps"
        )
    state.put("train.weight_decay", _float(state.take(f"{optim}.weight_decay")))
    betas = state.take(f"{optim}.betas")
    state.put("train.betas", [float(beta) for beta in betas] if isinstance(betas, list) else None)
    clip = state.take(f"{ACTOR}.grad_clip")
    own = state.take(f"{optim}.clip_grad")
    state.put("train.grad_clip", _float(own if own is not None else clip))


def _run(state: Translator) -> None:
    names = [state.take(f"trainer.{key}") for key in ("project_name", "experiment_name")]
    name = "-".join(str(part) for part in names if part is not None)
    if name:
        state.put("run.name", re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run")
    state.put("run.dir", state.take("trainer.default_local_dir"))
    steps = state.take("trainer.total_training_steps")
    state.put("run.num_steps", steps)
    epochs = state.take("trainer.total_epochs")
    if not isinstance(steps, int):
        state.differs.append(
            f"run.num_steps is not known: {epochs} epochs of a file that was not read, each of rows / "
            f"{state.launch.get('data.train_batch_size')} steps"
        )
    state.put("checkpoint.every", _at_least_zero(state.take("trainer.save_freq")))
    state.put("run.eval_every", _at_least_zero(state.take("trainer.test_freq")))
    state.put("checkpoint.keep", state.take("trainer.max_actor_ckpt_to_keep"))
    state.take("trainer.val_before_train")
    resume = {"disable": "never", "auto": "auto"}.get(str(state.take("trainer.resume_mode")))
    state.put("run.resume", resume)
    loggers = state.take("trainer.logger")
    wanted = [loggers] if isinstance(loggers, str) else loggers or []
    state.put("telemetry.sinks", [name for name in wanted if name in ("tensorboard", "wandb")])
    if others := [str(name) for name in wanted if name not in ("tensorboard", "wandb", "console", "file")]:
        state.missing["trainer.logger"] = f"no sink for {', '.join(others)}"


def _at_least_zero(value: Any) -> int | None:
    return max(0, value) if isinstance(value, int) else None


def translate_placement(state: Translator) -> None:
    """Sections `cluster` and `schedule`."""
    nodes, per_node = state.take("trainer.nnodes"), state.take("trainer.n_gpus_per_node")
    if isinstance(nodes, int) and isinstance(per_node, int):
        state.put("cluster.num_devices", nodes * per_node)
    state.put("cluster.device", {"npu": "npu", "cpu": "cpu"}.get(str(state.take("trainer.device"))))
    launch = state.launch
    if launch.uses_megatron:
        state.put("cluster.tensor_parallel_size", state.take(f"{ACTOR}.megatron.tensor_model_parallel_size"))
        for axis in ("pipeline_model_parallel", "context_parallel", "expert_model_parallel"):
            key = f"{ACTOR}.megatron.{axis}_size"
            if (state.take(key) or 1) != 1:
                state.missing[key] = "no such axis here"
    else:
        state.put("cluster.sequence_parallel_size", state.take(f"{ACTOR}.ulysses_sequence_parallel_size"))
        if launch.uses_reference:
            own = state.take(f"{REF}.ulysses_sequence_parallel_size")
            same = launch.sequence_parallel
            state.put("cluster.reference_sequence_parallel_size", own if own != same else None)
        if launch.uses_critic:
            own = state.take("critic.ulysses_sequence_parallel_size")
            state.put("critic.sequence_parallel_size", own if own != launch.sequence_parallel else None)
        shard = state.take(f"{ACTOR}.fsdp_config.fsdp_size")
        state.put("cluster.shard_size", shard if isinstance(shard, int) and shard > 0 else None)
        prefetch = state.take(f"{ACTOR}.fsdp_config.forward_prefetch")
        state.put("train.forward_prefetch", 1 if prefetch is True else None)
        state.put("train.reshard_after_forward", state.take(f"{ACTOR}.fsdp_config.reshard_after_forward"))
    mode = str(state.take("trainer.v1.trainer_mode"))
    if mode != "sync" or launch.is_separate:
        state.missing["trainer.v1.trainer_mode"] = (
            f"{mode}: the recipe trains synchronously (schedule.name: sync)"
        )
