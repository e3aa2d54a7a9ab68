"""A verl launch as a recipe that load_config accepts, and nothing of it lost silently."""

from pathlib import Path
from typing import Any

import pytest
from verl_rule_cases import CLEAN, A, F, M, R

from paceline.adapters.verl.launch import read_launch
from paceline.adapters.verl.translate import Translation, translate_launch
from paceline.cli import main
from paceline.config import load_config
from paceline.config.names import FIELDS

LAUNCHES = sorted((Path(__file__).parent / "launches").glob("*.sh"))


def translated_settings(changes: dict[str, str]) -> Translation:
    words = [f"{key}={value}" for key, value in {**CLEAN, **changes}.items()]
    (launch,) = read_launch(["python3", "-m", "verl.trainer.main_ppo", *words])
    return translate_launch(launch)


def value(translation: Translation, name: str) -> Any:
    section, _, key = name.partition(".")
    return translation.sections.get(section, {}).get(key)


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_the_recipe_is_accepted_and_holds_only_settings_that_exist(path: Path, tmp_path: Path) -> None:
    translation = translate_launch(read_launch(str(path))[0])
    assert translation.problems == ()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(translation.recipe, encoding="utf-8")
    config = load_config(recipe)
    for section, content in translation.sections.items():
        assert set(content) <= set(FIELDS[section])
        for key, wanted in content.items():
            written = getattr(getattr(config, section), key)
            assert (list(written) if isinstance(written, tuple) else written) == wanted


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_translating_the_recipes_own_launch_loses_no_batch_size(path: Path) -> None:
    (launch, *_) = read_launch(str(path))
    config = load_config(sections=translate_launch(launch).sections)
    assert config.batch.num_prompts == launch.integer("data.train_batch_size")
    assert config.batch.num_samples == launch.integer(f"{R}.n")
    assert config.rollout.max_new_tokens == launch.integer("data.max_response_length")
    assert config.batch.token_budget * config.cluster.sequence_parallel_size >= (launch.longest or 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"algorithm.name": None, "algorithm.aggregation": "token-mean", "algorithm.dual_clip": 3.0}),
        ({"algorithm.norm_adv_by_std_in_grpo": "False"}, {"algorithm.name": "dr_grpo"}),
        ({"algorithm.adv_estimator": "rloo"}, {"algorithm.name": "rloo"}),
        (
            {"algorithm.adv_estimator": "gae", "algorithm.lam": "0.95", "critic.optim.lr": "2e-5"},
            {"algorithm.name": "ppo", "algorithm.value_clip": 0.5, "critic.lr": 2e-5},
        ),
        ({f"{A}.policy_loss.loss_mode": "gspo"}, {"algorithm.loss": "gspo", "algorithm.dual_clip": None}),
        (
            {f"{A}.clip_ratio_low": "0.2", f"{A}.clip_ratio_high": "0.28"},
            {"algorithm.clip_low": None, "algorithm.clip_high": 0.28},
        ),
        ({f"{A}.clip_ratio": "0.1"}, {"algorithm.clip_low": None, "algorithm.clip_high": None}),
        (
            {f"{A}.kl_loss_coef": "0.02", f"{A}.kl_loss_type": "mse"},
            {
                "algorithm.kl_coefficient": 0.02,
                "algorithm.kl_estimator": "k2",
                "algorithm.kl_placement": None,
            },
        ),
        (
            {f"{A}.use_kl_loss": "False", "algorithm.use_kl_in_reward": "True"},
            {
                "algorithm.kl_coefficient": 0.001,
                "algorithm.kl_estimator": "k1",
                "algorithm.kl_placement": "reward",
            },
        ),
        ({f"{A}.use_kl_loss": "False"}, {"algorithm.kl_coefficient": None}),
        (
            {
                "algorithm.filter_groups.enable": "True",
                "algorithm.filter_groups.max_num_gen_batches": "4",
                "+reward_model.reward_kwargs.overlong_buffer_cfg.enable": "True",
                "+reward_model.reward_kwargs.overlong_buffer_cfg.len": "512",
            },
            {
                "algorithm.dynamic_sampling": True,
                "algorithm.max_generations": 4,
                "algorithm.overlong_cache": 512,
            },
        ),
        ({f"{A}.ppo_epochs": "2", f"{A}.entropy_coeff": "0.01"}, {"batch.num_epochs": 2}),
        (
            {f"{A}.ppo_max_token_len_per_gpu": "12288"},
            {"batch.token_budget": 12288},
        ),
        ({f"{A}.ppo_max_token_len_per_gpu": "1024"}, {"batch.token_budget": 4096}),
        (
            {f"{A}.use_dynamic_bsz": "False", f"{A}.ppo_micro_batch_size_per_gpu": "5"},
            {"batch.token_budget": 5 * 4096},
        ),
        ({f"{M}.use_remove_padding": "False"}, {"batch.layout": "padded", "batch.pad_to": None}),
        (
            {f"{A}.strategy": "megatron", f"{A}.megatron.use_remove_padding": "False"},
            {"batch.layout": "padded", "batch.pad_to": "mini_batch"},
        ),
        ({f"{M}.lora_rank": "32"}, {"lora.rank": 32, "lora.alpha": 16.0, "lora.target_modules": None}),
        ({f"{M}.enable_activation_offload": "True"}, {"train.activation_offload": True}),
        (
            {"reward_model.enable": "True", "reward_model.model.path": "org/rm"},
            {"reward.sources": {"model": {"kind": "model", "path": "org/rm", "token_budget": 32768}}},
        ),
        (
            {f"{A}.fsdp_config.optimizer_offload": "True", f"{F}.fsdp_config.param_offload": "True"},
            {"train.optimizer_offload": True, "train.param_offload": True},
        ),
        (
            {
                f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4",
                f"{F}.fsdp_config.ulysses_sequence_parallel_size": "2",
                "trainer.n_gpus_per_node": "8",
            },
            {
                "cluster.num_devices": 8,
                "cluster.sequence_parallel_size": 4,
                "cluster.reference_sequence_parallel_size": 2,
            },
        ),
        ({f"{M}.enable_gradient_checkpointing": "False"}, {"train.gradient_checkpointing": None}),
        (
            {
                f"{A}.optim.lr": "3e-6",
                f"{A}.optim.warmup_style": "cosine",
                f"{A}.optim.lr_warmup_steps": "10",
            },
            {"train.lr": 3e-6, "train.lr_schedule": "cosine", "train.warmup_steps": 10},
        ),
        (
            {
                "trainer.total_training_steps": "500",
                "trainer.resume_mode": "disable",
                "trainer.project_name": "a b",
            },
            {"run.num_steps": 500, "run.resume": "never", "run.name": "a-b"},
        ),
        (
            {"data.train_files": "[x.parquet]", "data.prompt_key": "question"},
            {"task.path": "x.parquet", "task.prompt_key": "question"},
        ),
        (
            {"custom_reward_function.path": "rewards/mine.py", "custom_reward_function.name": "score"},
            {"task.reward": "mine:score"},
        ),
        (
            {f"{R}.max_num_seqs": "96", f"{R}.temperature": "0.8"},
            {"rollout.max_running": 96, "rollout.temperature": 0.8},
        ),
    ],
)
def test_a_setting_becomes_ours(changes: dict[str, str], expected: dict[str, Any]) -> None:
    translation = translated_settings({"trainer.n_gpus_per_node": "1", **changes})
    assert {name: value(translation, name) for name in expected} == expected
    assert translation.problems == ()


def test_settings_of_vllm_are_said_in_the_words_of_the_engine_here() -> None:
    """The native engine generates; who wants vLLM can paste what stands there."""
    changes = {f"{R}.gpu_memory_utilization": "0.7", f"{R}.cudagraph_capture_sizes": "[1,2,4]"}
    translation = translated_settings({f"{R}.name": "vllm", f"{R}.max_num_seqs": "96", **changes})
    (said,) = [text for text in translation.differs if "rollout.engine=vllm" in text]
    overrides = said.partition("launch sets: ")[2].rstrip(")").split()
    sections = {name: dict(content) for name, content in translation.sections.items()}
    sections["rollout"].pop("max_running")  # the native engine's
    config = load_config(None, overrides, sections=sections)
    assert config.rollout.vllm.gpu_memory_utilization == 0.7 and config.rollout.vllm.max_num_seqs == 96
    assert config.rollout.vllm.cudagraph_capture_sizes == (1, 2, 4)
    assert not [key for key in translation.missing if "gpu_memory" in key]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("algorithm.adv_estimator", "remax"),
        (f"{A}.policy_loss.loss_mode", "clip_cov"),
        (f"{A}.loss_agg_mode", "token-sum"),
        (f"{A}.kl_loss_type", "abs"),
        (f"{R}.top_k", "50"),
        (f"{R}.engine_kwargs.vllm.swap_space", "4"),
        ("trainer.v1.trainer_mode", "colocate_async"),
        ("data.truncation", "left"),
        (f"{A}.fsdp_config.param_offload", "True"),
        (f"{F}.something_new", "1"),
    ],
)
def test_what_has_no_counterpart_is_listed_with_a_reason(key: str, text: str) -> None:
    translation = translated_settings({key: text})
    assert translation.missing[key]
    assert f"{key}" in translation.recipe


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("critic.enable", {"algorithm.adv_estimator": "gae", "critic.enable": "False"}),
        ("algorithm.use_kl_in_reward", {"algorithm.use_kl_in_reward": "True"}),
        (
            "algorithm.kl_ctrl.type",
            {
                f"{A}.use_kl_loss": "False",
                "algorithm.use_kl_in_reward": "True",
                "algorithm.kl_ctrl.type": "adaptive",
            },
        ),
        (
            "algorithm.filter_groups.metric",
            {"algorithm.filter_groups.enable": "True", "algorithm.filter_groups.metric": "entropy"},
        ),
        (
            "algorithm.filter_groups.max_num_gen_batches",
            {"algorithm.filter_groups.enable": "True", "algorithm.filter_groups.max_num_gen_batches": "0"},
        ),
        (
            "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
            {
                "reward_model.reward_kwargs.overlong_buffer_cfg.enable": "True",
                "reward_model.reward_kwargs.overlong_buffer_cfg.len": "512",
                "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": "0.5",
            },
        ),
        ("reward_model.enable", {"reward_model.enable": "True", "reward_model.model.path": "null"}),
        (f"{A}.optim.lr_scheduler_type", {f"{A}.optim.lr_scheduler_type": "zigzag"}),
        (f"{A}.optim.lr_warmup_steps_ratio", {f"{A}.optim.lr_warmup_steps_ratio": "0.1"}),
        ("trainer.logger", {"trainer.logger": "[console,swanlab]"}),
    ],
)
def test_a_setting_that_means_something_else_here_is_listed_with_a_reason(
    key: str, changes: dict[str, str]
) -> None:
    translation = translated_settings(changes)
    assert translation.missing[key]
    assert key in translation.recipe


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{A}.kl_loss_coef": "0"}, "a KL with weight 0"),
        (
            {
                f"{R}.log_prob_use_dynamic_bsz": "True",
                f"{F}.log_prob_use_dynamic_bsz": "True",
                f"{F}.log_prob_max_token_len_per_gpu": "32768",
            },
            "share batch.forward_token_budget",
        ),
    ],
)
def test_what_is_done_otherwise_is_said(changes: dict[str, str], said: str) -> None:
    assert any(said in line for line in translated_settings(changes).differs)


def test_megatron_s_selective_recomputation_is_ours() -> None:
    granularity = f"{A}.megatron.override_transformer_config.recompute_granularity"
    translation = translated_settings({f"{A}.strategy": "megatron", granularity: "selective"})
    assert value(translation, "train.gradient_checkpointing") == "selective"


def test_a_reward_model_s_own_code_is_trusted_where_the_launch_says_so() -> None:
    changes = {
        "reward_model.enable": "True",
        "reward_model.model.path": "org/reward-model",
        "reward_model.model.trust_remote_code": "True",
    }
    sources = value(translated_settings(changes), "reward.sources")
    assert sources["model"]["trust_remote_code"] is True


def test_a_setting_that_is_always_so_here_is_not_listed() -> None:
    assert "trainer.balance_batch" not in translated_settings({"trainer.balance_batch": "True"}).missing


def test_what_a_rule_refuses_is_replaced_by_the_nearest_value_and_said() -> None:
    translation = translated_settings({f"{A}.ppo_mini_batch_size": "100"})
    assert value(translation, "batch.mini_batch_prompts") == 128
    assert any("batch.mini_batch_prompts = 100" in line and "128" in line for line in translation.refused)


def test_a_launch_without_a_model_is_not_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{key}={text}" for key, text in CLEAN.items() if not key.endswith("model.path")]
    out = tmp_path / "recipe.yaml"
    assert (
        main(["translate", "verl", "python3", "-m", "verl.trainer.main_ppo", *words, "--out", str(out)]) == 1
    )
    assert "to do: model.path" in capsys.readouterr().out
    assert "batch:" in out.read_text(encoding="utf-8")


def test_the_recipe_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "verl", str(LAUNCHES[1])]) == 0
    assert capsys.readouterr().out.startswith("# Translated from a verl launch.")
