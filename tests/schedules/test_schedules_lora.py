"""Case 30 with adapters, and the rest of a LoRA run: what is trained, saved, resumed, delivered and exported."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import tiny_sections, write_other_weights
from transformers import AutoModelForCausalLM

from paceline.config import ConfigError, load_config
from paceline.model.loading import load_model
from paceline.schedules import recorder, run_training, setup
from paceline.schedules.credit import assign_credit
from paceline.schedules.display import Display
from paceline.schedules.rollouts import collect_groups
from paceline.schedules.saving import export_weights
from paceline.schedules.setup import open_run
from paceline.sync import fingerprint
from paceline.telemetry.metrics import MetricAccumulator, read_metrics

LORA = {"rank": 4, "alpha": 32.0}


@pytest.fixture(autouse=True)
def rewards_are_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "model"))


def lora_config(tmp_path, **changes):
    changes["lora"] = {**LORA, **changes.get("lora", {})}
    changes["task"] = {"eval_size": 0, **changes.get("task", {})}
    return load_config(None, sections=tiny_sections(tmp_path, **changes))


def engine_parameters(run):
    """What the rollout engine reads, asked from the engine itself."""
    return dict(run.engine._model.module.named_parameters())


def trainer_parameters(run):
    """What the trainer says its weights are: the float32 masters in the working dtype, over the frozen rest."""
    masters = {name: tensor.to(run.model.dtype) for name, tensor in run.trainer.optimizer.masters().items()}
    return {**dict(run.model.module.named_parameters()), **masters}


def one_step(run, step=1):
    """Rollout, one update, publish; returns the rollout that was trained on."""
    rollout = collect_groups(run, step)
    batch = assign_credit(run, rollout.groups)
    run.trainer.update(batch.samples, MetricAccumulator())
    run.sync.publish(version=step, verify=True)
    run.loader.mark_consumed(rollout.prompt_ids)
    return rollout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_changes_the_engines_fingerprint_by_its_adapters_and_to_the_trainers(tmp_path, dtype):
    config = lora_config(tmp_path, model={"dtype": dtype, "verify_packing": False}, train={"lr": 1e-2})
    with open_run(config, Display("t", 1, "off")) as run:
        before = {name: p.detach().clone() for name, p in engine_parameters(run).items()}
        one_step(run)
        after = engine_parameters(run)
        assert fingerprint(after.items()) != fingerprint(before.items())
        assert fingerprint(after.items()) == fingerprint(trainer_parameters(run).items())
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        # gradients of A are zero while B is: the first step moves the B of every layer, and no base weight
        assert moved == {name for name in before if ".lora_B." in name}
        assert run.engine.weight_version == 1


@torch.no_grad()
def test_engine_logprobs_are_those_of_the_exported_merged_weights_recomputed_offline(tmp_path):
    config = lora_config(tmp_path, train={"lr": 3e-2})
    with open_run(config, Display("t", 1, "off")) as run:
        with torch.enable_grad():
            one_step(run)
        groups = collect_groups(run, 2).groups
        export_weights(run.model, run.tokenizer, tmp_path)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
    untrained = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation="eager")
    moved = 0.0
    for group in groups:
        for sample in group.samples:
            ids = torch.tensor([[*group.prompt.token_ids, *sample.token_ids]])
            first = len(group.prompt.token_ids) - 1
            rows = [m(ids).logits[0, first:-1].log_softmax(-1) for m in (trained, untrained)]
            new, old = (row.gather(-1, ids[0, first + 1 :, None])[:, 0] for row in rows)
            torch.testing.assert_close(torch.tensor(sample.logprobs), new, atol=2e-4, rtol=0)
            moved = max(moved, float((new - old).abs().max()))
    assert moved > 0.05  # else the untrained weights would have passed as well


def test_without_a_learning_rate_the_engine_stays_on_the_trainers_distribution(tmp_path):
    result = run_training(lora_config(tmp_path, train={"lr": 0.0}, run={"num_steps": 50}))
    differences = [r.metrics["rollout/logprob_difference_mean"] for r in read_metrics(result.run_dir)]
    assert len(differences) == 50 and max(differences) < 2e-5


@pytest.mark.parametrize("kl", [{"kl_placement": "loss"}, {"kl_placement": "reward"}])
def test_the_kl_to_the_base_model_equals_that_to_a_separately_loaded_reference(tmp_path, monkeypatch, kl):
    def run(name):
        changes = {"run": {"name": name, "num_steps": 3}, "train": {"lr": 1e-2}}
        config = lora_config(tmp_path, algorithm={"kl_coefficient": 0.1, **kl}, **changes)
        return read_metrics(run_training(config).run_dir)

    shared = run("shared")
    with monkeypatch.context() as patched:
        patched.setattr(
            setup,
            "load_reference",
            lambda config, trainer, place, ledger: load_model(config.model, trainer.model.device, 0),
        )
        separate = run("separate")
    for ours, theirs in zip(shared, separate, strict=True):
        for name in ("kl/reference", "loss/total", "reward/mean", "grad_norm"):
            assert ours.metrics.get(name) == theirs.metrics.get(name)
    if kl["kl_placement"] == "loss":
        assert shared[0].metrics["kl/reference"] < 1e-6 < 1e-4 < shared[-1].metrics["kl/reference"]


def test_only_adapters_are_optimised_and_saved_and_a_resume_is_bit_equal(tmp_path, monkeypatch):
    schedule = {"lr": 1e-2, "lr_schedule": "linear"}
    whole = run_training(lora_config(tmp_path, run={"name": "whole", "num_steps": 4}, train=schedule))
    cut = lora_config(tmp_path, run={"name": "cut", "num_steps": 4}, train=schedule)
    original = recorder.Recorder.rollout

    def stop_in_step_2(self, *args):
        original(self, *args)
        if self._run.state.step == 1:
            self._run.stop.request()

    with monkeypatch.context() as patched:
        patched.setattr(recorder.Recorder, "rollout", stop_in_step_2)
        assert run_training(cut).summary["num_steps"] == 2
    resumed = run_training(cut)
    assert resumed.summary["num_steps"] == 4
    saved, again = (
        load_file(result.run_dir / "checkpoints" / "step_4" / "masters.safetensors")
        for result in (whole, resumed)
    )
    assert len(saved) == 7 * 2 * 2 and all(".lora_" in name for name in saved)
    for name, tensor in saved.items():
        assert torch.equal(again[name], tensor)


def test_a_checkpoint_of_other_adapters_or_another_base_is_refused(tmp_path):
    run_training(lora_config(tmp_path, run={"num_steps": 1}))
    with pytest.raises(ConfigError, match="rank") as refused:
        run_training(lora_config(tmp_path, run={"num_steps": 2}, lora={"rank": 8}))
    assert refused.value.key == "lora.rank"
    write_other_weights(tmp_path)
    with pytest.raises(ConfigError, match="keeps the adapters and the base model") as refused:
        other = {"path": str(tmp_path / "other")}
        run_training(lora_config(tmp_path, run={"num_steps": 2}, model=other))
    assert refused.value.key == "model.path"
    with pytest.raises(ConfigError, match="holds adapters of rank 4"):
        run_training(load_config(None, sections=tiny_sections(tmp_path, task={"eval_size": 0})))


def test_the_export_holds_merged_weights_and_the_adapter_alone(tmp_path):
    config = lora_config(tmp_path, checkpoint={"export_hf": True}, train={"lr": 1e-2})
    run_dir = run_training(config).run_dir
    adapter = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    assert (run_dir / "adapter" / "adapter_config.json").is_file()
    assert len(adapter) == 7 * 2 * 2
    merged = load_file(run_dir / "export" / "model.safetensors")
    base = load_file(Path(config.model.path) / "model.safetensors")
    assert merged.keys() == base.keys()
    moved = {name for name in base if not torch.equal(base[name], merged[name])}
    assert moved == {name for name in base if "proj" in name}


@pytest.mark.parametrize(
    "lora, match",
    [
        ({"rank": 4, "dropout": 0.1}, "dropout"),
        ({"rank": 0, "alpha": 16.0}, "rank"),
        ({"rank": 4, "r": 3}, "no such key"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(tmp_path, lora, match):
    with pytest.raises(ConfigError, match=match):
        load_config(None, sections=tiny_sections(tmp_path, lora=lora))


def test_the_lora_recipe_learns_at_reduced_size(tmp_path):
    sections = tiny_sections(tmp_path)
    recipe = Path(__file__).parents[2] / "recipes" / "lora-grpo.yaml"
    config = load_config(
        recipe,
        sections={
            "run": {"dir": str(tmp_path / "runs"), "num_steps": 12, "eval_every": 0},
            "model": sections["model"],
            "task": {"size": 32, "num_examples": 0, "eval_size": 8, "reward": "tiny_rewards:even_share"},
            "batch": {"num_prompts": 4, "num_samples": 4, "token_budget": 512},
            "rollout": {"max_new_tokens": 6},
            "train": {"warmup_steps": 0, "lr": 1e-2},
            "telemetry": {"live": "off"},
        },
    )
    assert config.lora.rank and config.algorithm.kl_coefficient
    run_dir = run_training(config).run_dir
    rewards = [r.metrics["reward/mean"] for r in read_metrics(run_dir) if "reward/mean" in r.metrics]
    assert rewards[0] < 0.6 and sum(rewards[-3:]) / 3 > rewards[0] + 0.3
    assert (run_dir / "export").is_dir() and (run_dir / "adapter").is_dir()
