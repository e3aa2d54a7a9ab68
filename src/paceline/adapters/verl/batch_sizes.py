"""The effective batch arithmetic of a verl launch: what the workers make of the global and per-device sizes."""

from dataclasses import asdict, dataclass

from paceline.adapters.verl.defaults import ACTOR, ROLLOUT
from paceline.adapters.verl.launch import VerlLaunch


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Derived sizes; None where the launch leaves one open. Samples are prompts times `samples_per_prompt`."""

    num_devices: int | None
    prompts_per_step: int | None
    samples_per_prompt: int | None
    samples_per_step: int | None
    mini_batch_prompts: int | None
    mini_batch_samples: int | None
    updates_per_step: int | None
    """Optimiser updates of one rollout, all epochs."""
    model_parallel: int | None
    """Devices that hold one sample in training: Ulysses, or tensor x pipeline x context parallel."""
    data_parallel: int | None
    mini_batch_samples_per_rank: float | None
    micro_batch_samples: int | None
    """Samples of a micro-batch; None when micro-batches are cut by tokens."""
    micro_batches_per_update: int | None
    """Forward-backward passes of one update; with token budgets the number when every sample is as long as allowed."""
    token_budget: int | None
    """Tokens of a micro-batch over the devices that share it; None when micro-batches are cut by samples."""
    longest_sample: int | None
    rollout_replicas: int | None
    samples_per_replica: float | None
    max_tokens_per_step: int | None

    def as_dict(self) -> dict[str, float | None]:
        """The fields, for JSON."""
        return asdict(self)


def batch_sizes(launch: VerlLaunch) -> BatchSizes:
    """Every number that follows from the launch's settings and verl's defaults."""
    devices = launch.num_devices
    prompts, n = launch.integer("data.train_batch_size"), launch.integer(f"{ROLLOUT}.n")
    samples = _product(prompts, n)
    mini = launch.integer(f"{ACTOR}.ppo_mini_batch_size")
    model_parallel = _model_parallel(launch)
    data_parallel = _whole_ratio(devices, model_parallel)
    mini_samples = _product(mini, n)
    per_rank = mini_samples / data_parallel if mini_samples is not None and data_parallel else None
    is_dynamic = launch.flag(f"{ACTOR}.use_dynamic_bsz")
    micro = None if is_dynamic else micro_batch_per_device(launch, data_parallel)
    budget = None
    if is_dynamic and (per_device := launch.integer(f"{ACTOR}.ppo_max_token_len_per_gpu")):
        budget = per_device * launch.sequence_parallel
    epochs = launch.integer(f"{ACTOR}.ppo_epochs") or 1
    replicas = _whole_ratio(devices, _rollout_parallel(launch))
    return BatchSizes(
        num_devices=devices,
        prompts_per_step=prompts,
        samples_per_prompt=n,
        samples_per_step=samples,
        mini_batch_prompts=mini,
        mini_batch_samples=mini_samples,
        updates_per_step=-(-prompts // mini) * epochs if prompts and mini else None,
        model_parallel=model_parallel,
        data_parallel=data_parallel,
        mini_batch_samples_per_rank=per_rank,
        micro_batch_samples=micro,
        micro_batches_per_update=_micro_batches(per_rank, micro, budget, launch.longest),
        token_budget=budget,
        longest_sample=launch.longest,
        rollout_replicas=replicas,
        samples_per_replica=samples / replicas if samples is not None and replicas else None,
        max_tokens_per_step=_product(samples, launch.longest),
    )


def micro_batch_per_device(launch: VerlLaunch, data_parallel: int | None) -> int | None:
    """Samples of an actor micro-batch on a device, from the per-device size or the deprecated global one."""
    per_device = launch.integer(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if per_device is not None:
        return per_device
    whole = launch.integer(f"{ACTOR}.ppo_micro_batch_size")
    return whole // data_parallel if whole is not None and data_parallel else None


def describe_sizes(sizes: BatchSizes) -> str:
    """The arithmetic as text, a line each."""
    cut = "by tokens" if sizes.token_budget is not None else "by samples"
    rows = [
        ("devices", sizes.num_devices, ""),
        (
            "samples per step",
            sizes.samples_per_step,
            f"{sizes.prompts_per_step} prompts x {sizes.samples_per_prompt}",
        ),
        (
            "samples per update",
            sizes.mini_batch_samples,
            f"{sizes.mini_batch_prompts} prompts x {sizes.samples_per_prompt}",
        ),
        ("updates per step", sizes.updates_per_step, ""),
        (
            "data-parallel ranks",
            sizes.data_parallel,
            f"{sizes.num_devices} devices / {sizes.model_parallel} per sample",
        ),
        ("samples per rank and update", sizes.mini_batch_samples_per_rank, ""),
        ("micro-batches per update", sizes.micro_batches_per_update, f"{cut}, all samples at full length"),
        ("samples per micro-batch", sizes.micro_batch_samples, ""),
        ("tokens per micro-batch", sizes.token_budget, "over the devices that share it"),
        ("longest sample", sizes.longest_sample, "tokens, prompt and response"),
        ("rollout replicas", sizes.rollout_replicas, ""),
        ("samples per replica", sizes.samples_per_replica, ""),
        ("most tokens per step", sizes.max_tokens_per_step, ""),
    ]
    lines = [
        _row(label, value, note) for label, value, note in rows if value is not None or label not in _OPTIONAL
    ]
    return "\n".join(lines)


_OPTIONAL = frozenset({"samples per micro-batch", "tokens per micro-batch"})


def _row(label: str, value: float | None, note: str) -> str:
    shown = "unknown" if value is None else f"{value:,.1f}".removesuffix(".0")
    return f"  {label:<28} {shown:>14}  {note}".rstrip()


def _model_parallel(launch: VerlLaunch) -> int | None:
    if not launch.uses_megatron:
        return launch.sequence_parallel
    sizes = [launch.integer(f"{ACTOR}.megatron.{kind}_size") for kind in MEGATRON_AXES]
    return _product(*sizes)


MEGATRON_AXES = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")


def _rollout_parallel(launch: VerlLaunch) -> int | None:
    kinds = ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel")
    return _product(*(launch.integer(f"{ROLLOUT}.{kind}_size") for kind in kinds))


def _product(*factors: int | None) -> int | None:
    result = 1
    for factor in factors:
        if factor is None:
            return None
        result *= factor
    return result


def _whole_ratio(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or not part else whole // part or None


def _micro_batches(
    per_rank: float | None, micro: int | None, budget: int | None, longest: int | None
) -> int | None:
    if per_rank is None:
        return None
    if micro:
        return int(-(-per_rank // micro))
    if budget and longest:
        return int(-(-per_rank * longest // budget))
    return None
