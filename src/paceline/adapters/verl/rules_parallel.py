"""Rules about how the model is spread over devices."""

from collections.abc import Iterator

from paceline.adapters.verl.batch_sizes import MEGATRON_AXES, batch_sizes
from paceline.adapters.verl.defaults import ACTOR, REF, ROLLOUT
from paceline.adapters.verl.findings import ASCEND, GUIDE, LONG_RUN, Hit, Rule
from paceline.adapters.verl.launch import VerlLaunch
from paceline.adapters.verl.models import allowed_sequence_parallel

MEGATRON = f"{ACTOR}.megatron"
ULYSSES = "ulysses_sequence_parallel_size"


def _ulysses(launch: VerlLaunch) -> Iterator[tuple[str, int]]:
    if launch.uses_megatron:
        return
    sections = [ACTOR, *([REF] if launch.uses_reference else []), *(["critic"] if launch.uses_critic else [])]
    for section in sections:
        size = launch.integer(f"{section}.{ULYSSES}")
        if size is not None and size > 1:
            yield f"{section}.{ULYSSES}", size


def ulysses_suits_the_heads(launch: VerlLaunch) -> Iterator[Hit]:
    model = launch.model
    if model is None:
        return
    allowed = allowed_sequence_parallel(model)
    devices = launch.num_devices
    possible = [size for size in allowed if not devices or devices % size == 0]
    for key, size in _ulysses(launch):
        if size not in allowed:
            why = (
                f"the model has {model.num_heads} heads and {model.num_kv_heads} key-value heads: the size must divide "
                "the heads, and it and the key-value heads one another"
            )
            yield Hit(key, size, ", ".join(map(str, possible)), why)


def ulysses_divides_the_devices(launch: VerlLaunch) -> Iterator[Hit]:
    devices = launch.num_devices
    for key, size in _ulysses(launch):
        if devices and devices % size:
            fitting = [one for one in range(1, size + 1) if devices % one == 0]
            yield Hit(key, size, fitting[-1], f"{devices} devices cannot be cut into groups of {size}")


def ulysses_has_packed_rows(launch: VerlLaunch) -> Iterator[Hit]:
    key = "actor_rollout_ref.model.use_remove_padding"
    if not launch.flag(key) and any(launch.sequence_parallel > 1 for _ in _ulysses(launch)):
        yield Hit(key, False, True, "Ulysses splits packed rows; verl refuses it on padded ones")


def ulysses_key_is_current(launch: VerlLaunch) -> Iterator[Hit]:
    for section in (ACTOR, REF):
        key = f"{section}.{ULYSSES}"
        if key in launch.settings:
            new = f"{section}.fsdp_config.{ULYSSES}"
            yield Hit(
                key,
                launch.get(key),
                f"{new}={launch.get(key)}",
                "deprecated in favour of the engine's own key",
            )


def megatron_divides_the_devices(launch: VerlLaunch) -> Iterator[Hit]:
    sizes = batch_sizes(launch)
    if not launch.uses_megatron or not sizes.num_devices or not sizes.model_parallel:
        return
    if sizes.num_devices % sizes.model_parallel:
        parts = [launch.integer(f"{MEGATRON}.{axis}_size") or 1 for axis in MEGATRON_AXES]
        why = f"tensor x pipeline x context = {' x '.join(map(str, parts))} does not divide {sizes.num_devices} devices"
        yield Hit(
            f"{MEGATRON}.tensor_model_parallel_size", parts[0], "sizes whose product divides the devices", why
        )


def experts_divide_the_devices(launch: VerlLaunch) -> Iterator[Hit]:
    devices, expert = launch.num_devices, launch.integer(f"{MEGATRON}.expert_model_parallel_size")
    if not launch.uses_megatron or not devices or not expert or expert == 1:
        return
    pipeline = launch.integer(f"{MEGATRON}.pipeline_model_parallel_size") or 1
    tensor = launch.integer(f"{MEGATRON}.expert_tensor_parallel_size")
    tensor = tensor or launch.integer(f"{MEGATRON}.tensor_model_parallel_size") or 1
    if devices % (expert * tensor * pipeline):
        why = f"expert x expert-tensor x pipeline = {expert} x {tensor} x {pipeline} does not divide {devices} devices"
        whole = devices % (expert * pipeline) == 0
        fix = (
            f"{MEGATRON}.expert_tensor_parallel_size=1"
            if whole
            else "a size whose product divides the devices"
        )
        yield Hit(f"{MEGATRON}.expert_model_parallel_size", expert, fix, why)


def context_parallel_reaches_mindspeed(launch: VerlLaunch) -> Iterator[Hit]:
    if not launch.uses_megatron or not launch.is_ascend:
        return
    for section in (ACTOR, *([REF] if launch.uses_reference else [])):
        size = launch.integer(f"{section}.megatron.context_parallel_size")
        key = f"{section}.megatron.override_transformer_config.context_parallel_size"
        inherited = launch.integer(f"{ACTOR}.megatron.override_transformer_config.context_parallel_size")
        present = launch.integer(key) if launch.is_set(key) else (inherited if section == REF else None)
        if size and size > 1 and present != size:
            why = f"context_parallel_size={size} must be in the override block too, or MindSpeed fails at the start"
            yield Hit(key, present, f"+{key}={size}", why)


def experts_stay_whole(launch: VerlLaunch) -> Iterator[Hit]:
    model, key = launch.model, f"{MEGATRON}.expert_tensor_parallel_size"
    expert = launch.integer(f"{MEGATRON}.expert_model_parallel_size") or 1
    is_moe = expert > 1 or (model is not None and model.num_experts > 0)
    tensor = launch.integer(f"{MEGATRON}.tensor_model_parallel_size") or 1
    size = launch.integer(key)
    if launch.uses_megatron and is_moe and (size or tensor) > 1:
        why = f"experts are cut into {size or tensor} slices (unset: the tensor size): small products, more traffic"
        yield Hit(key, size, 1, why)


def experts_stay_within_a_node(launch: VerlLaunch) -> Iterator[Hit]:
    per_node = launch.integer("trainer.n_gpus_per_node")
    for key in (f"{ROLLOUT}.expert_parallel_size", f"{MEGATRON}.expert_model_parallel_size"):
        size = launch.integer(key)
        if per_node and size and size > per_node:
            why = (
                f"every layer exchanges tokens between {size} devices, and a node has {per_node}: it crosses the "
                "network. 128 on Atlas A2 was slower than less"
            )
            yield Hit(key, size, per_node, why)


def rollout_experts_match(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ROLLOUT}.expert_parallel_size"
    expert, tensor, data = (
        launch.integer(one)
        for one in (key, f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.data_parallel_size")
    )
    if expert and expert > 1 and tensor and data and expert != tensor * data:
        why = f"above 1 it must be tensor x data = {tensor} x {data} of the rollout"
        yield Hit(key, expert, tensor * data, why)


def rollout_divides_the_devices(launch: VerlLaunch) -> Iterator[Hit]:
    devices, key = launch.num_devices, f"{ROLLOUT}.tensor_model_parallel_size"
    kinds = ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel")
    parts = [launch.integer(f"{ROLLOUT}.{kind}_size") or 1 for kind in kinds]
    product = parts[0] * parts[1] * parts[2]
    if devices and not launch.is_separate and devices % product:
        why = f"a replica takes tensor x data x pipeline = {' x '.join(map(str, parts))} of {devices} devices"
        yield Hit(key, parts[0], "sizes whose product divides the devices", why)


def small_models_roll_out_on_few_devices(launch: VerlLaunch) -> Iterator[Hit]:
    key, model = f"{ROLLOUT}.tensor_model_parallel_size", launch.model
    size = launch.integer(key)
    if model is None or model.billions is None or size is None or size == 1 or model.billions > 9:
        return
    why = (
        f"{model.billions:g} billion parameters fit one device: more replicas generate more than larger ones"
    )
    yield Hit(key, size, 1, why, f"{size} x as many replicas, each with its own KV cache")


def optimizer_is_distributed(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{MEGATRON}.use_distributed_optimizer"
    if launch.uses_megatron and launch.get(key) is False:
        why = "every data-parallel rank keeps all optimiser states"
        effect = f"optimiser memory per device divided by {batch_sizes(launch).data_parallel}"
        yield Hit(key, False, True, why, effect if batch_sizes(launch).data_parallel else None)


def pipelines_are_filled(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{MEGATRON}.pipeline_model_parallel_size"
    stages, passes = launch.integer(key), batch_sizes(launch).micro_batches_per_update
    virtual = launch.integer(f"{MEGATRON}.virtual_pipeline_model_parallel_size") or 1
    if not launch.uses_megatron or not stages or stages < 2 or not passes:
        return
    bubble = (stages - 1) / (virtual * passes + stages - 1)
    if bubble > 0.25:
        why = f"{passes} micro-batches through {stages} pipeline stages: they wait {bubble:.0%} of the time"
        yield Hit(key, stages, max(1, stages // 2), why, f"idle share of update_actor {bubble:.0%}")


def fsdp_is_the_second(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ACTOR}.strategy"
    if not launch.uses_megatron and launch.get(key) == "fsdp":
        why = "FSDP2 shards by parameter, without the flat copies of the first"
        yield Hit(
            key,
            "fsdp",
            "fsdp2",
            why,
            "about 7 % less memory, 1.5 % more throughput (torchtitan's measurement)",
        )


def parameters_are_prefetched(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ACTOR}.fsdp_config.forward_prefetch"
    nodes = launch.integer("trainer.nnodes") or 1
    if not launch.uses_megatron and nodes > 1 and not launch.flag(key):
        why = "between nodes the gather of the next layer's parameters is not hidden behind the present one"
        yield Hit(key, False, True, why)


RULES = (
    Rule("parallel/ulysses-heads", "error", "B4", "verl#1226", ulysses_suits_the_heads),
    Rule("parallel/ulysses-devices", "error", "B4", "device mesh", ulysses_divides_the_devices),
    Rule("parallel/ulysses-padded", "error", "B4", "verl actor checks", ulysses_has_packed_rows),
    Rule("parallel/ulysses-old-key", "advice", "B4", "verl engine config", ulysses_key_is_current),
    Rule("parallel/megatron-devices", "error", "B6", "device mesh", megatron_divides_the_devices),
    Rule("parallel/expert-devices", "error", "B6", "device mesh", experts_divide_the_devices),
    Rule(
        "parallel/context-override",
        "error",
        "D2",
        f"{ASCEND}, Megatron; {LONG_RUN}, section 4",
        context_parallel_reaches_mindspeed,
    ),
    Rule("parallel/expert-tensor", "warning", "B6", f"{LONG_RUN}, section 3.3.3", experts_stay_whole),
    Rule(
        "parallel/expert-interconnect",
        "warning",
        "D2",
        f"{LONG_RUN}, section 3.2.2",
        experts_stay_within_a_node,
    ),
    Rule("parallel/rollout-experts", "error", "B11", "verl rollout config", rollout_experts_match),
    Rule("parallel/rollout-devices", "error", "B11", "device mesh", rollout_divides_the_devices),
    Rule(
        "parallel/rollout-tensor", "advice", "B11", f"{GUIDE}, rollout", small_models_roll_out_on_few_devices
    ),
    Rule(
        "parallel/distributed-optimizer",
        "warning",
        "B5",
        f"{LONG_RUN}, section 3.3.2",
        optimizer_is_distributed,
    ),
    Rule("parallel/pipeline-bubble", "warning", "B6", f"{LONG_RUN}, section 3.3.5", pipelines_are_filled),
    Rule("parallel/fsdp2", "advice", "B6", f"{GUIDE}, FSDP2", fsdp_is_the_second),
    Rule(
        "parallel/forward-prefetch", "advice", "B6", f"{GUIDE}, forward prefetch", parameters_are_prefetched
    ),
)
