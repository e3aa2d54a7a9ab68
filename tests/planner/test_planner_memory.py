"""The run's estimate: exact parameters, phases that do not overlap, roles, sharding; refusals that name what fits."""

import pytest
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from paceline.bench.shapes import SHAPES, shape_config
from paceline.cli.app import main
from paceline.config import Config, ConfigError, load_config
from paceline.planner.fit import check_fit, largest_budget, usable_bytes, ways_to_fit
from paceline.planner.memory import GIB, MemoryEstimate
from paceline.planner.memory_table import memory_table
from paceline.planner.model_shape import MemoryShape
from paceline.planner.run_facts import RunFacts
from paceline.planner.run_memory import estimate_run


def shape_of(name: str) -> MemoryShape:
    return MemoryShape.from_hf_config(shape_config(name).to_dict())


def config(*overrides: str) -> Config:
    base = {
        "model": {"path": "some/model"},
        "task": {"path": "prompts.jsonl"},
        "batch": {"token_budget": 16384},
        "rollout": {"max_new_tokens": 512},
        "cluster": {"device": "cuda"},
    }
    return load_config(None, overrides, sections=base)


def estimate(*overrides: str, name: str = "qwen3-1.7b", prompt: int = 512) -> MemoryEstimate:
    return estimate_run(config(*overrides), RunFacts(shape_of(name), 2, prompt))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_follow_from_the_config_exactly(family):
    module = AutoModelForCausalLM.from_config(FAMILIES[family])
    shape = MemoryShape.from_hf_config(FAMILIES[family].to_dict())
    assert shape.num_parameters == sum(p.numel() for p in module.parameters())


def test_parameters_of_a_mixture_count_every_expert():
    mixture = Qwen3MoeConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=24, mlp_only_layers=[0],
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(mixture)
    shape = MemoryShape.from_hf_config(mixture.to_dict())
    assert shape.num_parameters == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19), ("llama3-8b", 8.03)]
)
def test_published_shapes_have_their_published_size(name, billions):
    assert shape_of(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_training_states_are_sixteen_bytes_a_parameter_beside_the_working_weights():
    num_parameters = shape_of("qwen3-1.7b").num_parameters
    found = estimate()
    states = sum(found.part(name) for name in ("masters", "moments", "gradients"))
    assert states == 16 * num_parameters
    assert found.part("weights") == 2 * num_parameters


def test_the_peak_is_what_is_always_there_and_the_largest_phase_of_one_role():
    found = estimate("algorithm.name=ppo", "algorithm.kl_coefficient=0.1")
    always = sum(part.num_bytes for part in found.parts if part.phase == "always")
    phases = ("head", "layers", "end of backward", "optimizer", "scoring", "rollout")
    assert found.total == max(found.of_phase(role, phase) for role in ("actor", "critic") for phase in phases)
    assert found.of_phase("critic", "optimizer") == always + found.part("gradients, summed", "critic")
    assert found.part("reference weights") == found.part("weights")
    assert found.part("weights", "critic") == found.part("weights")


@pytest.mark.parametrize("preset", ["fast", "plain"])
@pytest.mark.parametrize("part", ["every_k", "selective"])
def test_recomputing_more_needs_less(part, preset):
    totals = [
        estimate(f"train.gradient_checkpointing={choice}", f"train.preset={preset}").total
        for choice in ("none", part, "all")
    ]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 3


def test_kernels_of_the_fast_preset_need_less_than_plain_layers():
    assert estimate().total < estimate("train.preset=plain").total


def test_adapters_need_states_for_themselves_only():
    full, adapted = (
        estimate("algorithm.kl_coefficient=0.1"),
        estimate("algorithm.kl_coefficient=0.1", "lora.rank=16"),
    )
    assert adapted.part("moments") < 0.02 * full.part("moments")
    assert adapted.part("reference weights") == 0
    shape = shape_of("qwen3-1.7b")
    per_layer = 16 * (2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144))
    assert adapted.part("adapters") == 2 * shape.model.num_layers * per_layer


def test_a_parked_reference_counts_while_it_scores_only():
    here = estimate("algorithm.kl_coefficient=0.1")
    parked = estimate("algorithm.kl_coefficient=0.1", "train.param_offload=true")
    assert here.total - parked.total == here.part("reference weights") == parked.part("reference weights")
    scoring = parked.of_phase("actor", "scoring") - here.of_phase("actor", "scoring")
    assert scoring == pytest.approx(0.0, abs=1.0)


def test_states_on_the_host_are_not_on_the_device():
    plain, offloaded = estimate(), estimate("train.optimizer_offload=true")
    assert offloaded.part("masters") == offloaded.part("moments") == 0
    assert offloaded.total < plain.total - 0.9 * (plain.part("masters") + plain.part("moments"))


def on_ranks(**cluster: int) -> MemoryEstimate:
    one = config()
    several = one.model_copy(update={"cluster": one.cluster.model_copy(update=cluster)})
    return estimate_run(several, RunFacts(shape_of("qwen3-1.7b"), 2, 512))


def test_states_are_divided_over_shards_and_weights_over_tensor_parallel_ranks():
    alone, sharded = on_ranks(), on_ranks(num_devices=8)
    assert sharded.part("moments") == pytest.approx(alone.part("moments") / 8)
    assert sharded.part("gathered weights") > 0
    copied = on_ranks(num_devices=8, replicate_size=2)
    assert copied.part("moments") == pytest.approx(alone.part("moments") / 4)
    assert sharded.part("weights gathered to sample") == alone.part("weights")
    assert (
        sharded.part("weights") == 0
    )  # shards are masters: nothing is held in the working dtype beside them
    tensor = on_ranks(num_devices=2, tensor_parallel_size=2)
    assert tensor.part("masters") == pytest.approx(alone.part("masters") / 2, rel=0.01)
    assert alone.part("activations") / 2 < tensor.part("activations") < alone.part("activations")
    # a sequence-parallel micro-batch holds more tokens, of which each rank keeps its budget
    sequence = on_ranks(num_devices=2, sequence_parallel_size=2)
    assert sequence.part("activations") == alone.part("activations")
    assert sequence.part("moments") == pytest.approx(alone.part("moments") / 2)


def test_the_cache_follows_the_slots_their_capacity_and_its_bound():
    found = estimate("rollout.max_running=64", prompt=500).part("KV cache")
    assert found == 2 * 28 * 8 * 128 * 2 * 64 * 1024  # 500 + 512 tokens, in steps of 32
    assert estimate("rollout.kv_cache_gb=1", prompt=500).part("KV cache") == GIB


def test_a_cache_that_is_given_back_counts_while_sampling_only():
    kept, given_back = estimate(), estimate("rollout.keep_cache=false")
    assert kept.of_phase("actor", "rollout") == given_back.of_phase("actor", "rollout")
    update = kept.of_phase("actor", "layers") - given_back.of_phase("actor", "layers")
    assert update == pytest.approx(kept.part("KV cache"))


def test_prompts_nobody_has_read_yet_are_assumed_and_the_table_says_so():
    found = estimate_run(config(), RunFacts(shape_of("qwen3-1.7b"), 2))
    assert "until the task is read" in memory_table(found)
    assert "until the task is read" not in memory_table(estimate())


def test_the_table_shows_every_part_in_gib_and_the_device():
    found = estimate()
    table = memory_table(found, 80e9)
    assert f"{found.part('activations') / GIB:.2f}" in table and f"{found.total / GIB:.2f}" in table
    assert "74.51" in table
    assert all(part.name in table for part in found.parts if part.num_bytes)


def test_a_run_that_fits_is_not_refused():
    facts = RunFacts(shape_of("qwen3-0.6b"), 2, 512)
    assert check_fit(config(), facts, 141e9).total < 141e9


def test_a_refusal_names_every_single_switch_that_would_fit_with_its_estimate():
    facts, usable = RunFacts(shape_of("qwen3-1.7b"), 2, 512), usable_bytes(60e9)
    with pytest.raises(ConfigError) as refused:
        check_fit(config(), facts, 60e9)
    switches = ways_to_fit(config(), facts, usable)
    assert {"train.gradient_checkpointing: all", "batch.token_budget"} <= {
        s.setting if "budget" not in s.setting else "batch.token_budget" for s in switches
    }
    for switch in switches:
        assert switch.total <= usable
        assert f"{switch.setting} ({switch.total / GIB:.1f} GiB)" in (refused.value.nearest or "")
        assert estimate_run(switch.config, facts).total == switch.total


def test_where_no_single_switch_fits_switches_are_combined():
    facts = RunFacts(shape_of("qwen3-4b"), 2, 512)
    (way,) = ways_to_fit(config(), facts, usable_bytes(60e9))
    assert " with " in way.setting and way.total <= usable_bytes(60e9)


def test_the_largest_budget_is_the_last_that_fits():
    facts, usable = RunFacts(shape_of("qwen3-1.7b"), 2, 512), usable_bytes(60e9)
    budget = largest_budget(config(), facts, usable)
    assert budget is not None and budget % 256 == 0
    assert estimate_run(config(), facts, budget).total <= usable
    assert estimate_run(config(), facts, budget + 256).total > usable
    assert largest_budget(config(), RunFacts(shape_of("qwen3-8b"), 2, 512), usable) is None


def dry_run(tmp_path, name: str, *overrides: str) -> int:
    shape_config(name).save_pretrained(tmp_path / name)
    settings = [f"model.path={tmp_path / name}", "task.name=word_sorting", "batch.token_budget=16384"]
    return main(["train", *settings, "cluster.device=cuda", *overrides, "--dry-run"])


def test_a_dry_run_prints_the_estimate(tmp_path, capsys):
    assert dry_run(tmp_path, "qwen3-1.7b", "cluster.device_name=H200") == 0
    printed = capsys.readouterr().out
    assert "memory per device, estimated, GiB" in printed and "the device has    " in printed


def test_a_dry_run_refuses_what_the_device_cannot_hold_and_says_what_it_could(tmp_path, capsys):
    assert dry_run(tmp_path, "qwen3-1.7b", "cluster.device_memory_gb=60") == 2
    refusal = capsys.readouterr().err
    assert "the run needs" in refusal and "train.gradient_checkpointing: all (" in refusal


def test_an_unknown_device_name_is_refused(tmp_path, capsys):
    assert dry_run(tmp_path, "qwen3-0.6b", "cluster.device_name=H2OO") == 2
    assert "cluster.device_memory_gb" in capsys.readouterr().err


def test_every_benchmark_shape_is_readable():
    assert all(shape_of(name).num_parameters > 0 for name in SHAPES)
