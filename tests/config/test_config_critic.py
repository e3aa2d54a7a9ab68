"""The critic's settings: refused where there is no critic, its own where given, the actor's where not."""

import pytest

from paceline.config import ConfigError, load_config
from paceline.config.arithmetic import batch_arithmetic, check_lengths, describe
from paceline.config.critic import (
    critic_batch,
    critic_epochs,
    critic_model,
    critic_train,
    num_critic_updates,
)
from paceline.config.schema import Config

BASE = {"model": {"path": "org/model", "revision": "v1"}, "task": {"path": "prompts.jsonl"}}


def ppo(*overrides: str) -> Config:
    return load_config(None, ["algorithm.name=ppo", *overrides], base=BASE)


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides, base=BASE)
    return caught.value


def test_ppo_brings_what_its_papers_publish() -> None:
    algorithm = ppo().algorithm
    assert (algorithm.advantage, algorithm.loss, algorithm.aggregation) == ("gae", "clip", "token-mean")
    assert (algorithm.gamma, algorithm.gae_lambda, algorithm.value_clip) == (1.0, 0.95, 0.2)
    assert algorithm.whiten_advantages and (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.2)


@pytest.mark.parametrize(
    ("overrides", "key", "nearest"),
    [
        (["critic.lr=1e-6"], "critic.lr", "algorithm.name: ppo, or leave it out"),
        (["critic.path=org/reward"], "critic.path", None),
        (["critic.pretrain_steps=1"], "critic.pretrain_steps", None),
        (["algorithm.gamma=0.9"], "algorithm.gamma", "1.0"),
        (["algorithm.gae_lambda=1"], "algorithm.gae_lambda", "0.95"),
        (["algorithm.value_clip=0"], "algorithm.value_clip", "0.2"),
        (["algorithm.whiten_advantages=false"], "algorithm.whiten_advantages", "true"),
        (["algorithm.name=ppo", "critic.pretrain_steps=100"], "critic.pretrain_steps", "99"),
        (["algorithm.name=ppo", "critic.revision=v2"], "critic.revision", "null"),
        (["algorithm.name=ppo", "critic.warmup_steps=101"], "critic.warmup_steps", "100"),
        (["algorithm.name=ppo", "critic.betas=[0.9, 1.0]"], "critic.betas", "[0.9, 0.95]"),
        (["algorithm.name=ppo", "critic.token_budget=100"], "critic.token_budget", None),
        (["algorithm.name=ppo", "critic.forward_token_budget=100"], "critic.forward_token_budget", None),
        (["algorithm.name=ppo", "algorithm.gae_lambda=1.5"], "algorithm.gae_lambda", "1.0"),
        (
            ["algorithm.name=ppo", "critic.pretrain_steps=90", "train.warmup_steps=11"],
            "train.warmup_steps",
            "10",
        ),
    ],
)
def test_a_contradiction_is_refused_under_its_key(
    overrides: list[str], key: str, nearest: str | None
) -> None:
    error = refusal(*overrides)
    assert error.key == key
    if nearest is not None:
        assert error.nearest == nearest


def test_every_setting_without_a_critic_is_named_and_its_reason_given() -> None:
    error = refusal("critic.lr=1e-6", "critic.num_epochs=2", "algorithm.gamma=0.9")
    assert {problem.key for problem in error.problems} == {
        "critic.lr",
        "critic.num_epochs",
        "algorithm.gamma",
    }
    assert "advantage is group_norm, which has no critic" in str(error)


def test_defaults_written_out_contradict_nothing() -> None:
    load_config(None, ["critic.lr=1e-5", "critic.betas=[0.9, 0.95]", "algorithm.gamma=1.0"], base=BASE)


def test_a_critic_can_judge_one_sample_per_prompt() -> None:
    assert ppo("batch.num_samples=1").batch.num_samples == 1


def test_the_critic_takes_the_actors_settings_where_it_has_none_of_its_own() -> None:
    config = ppo("batch.token_budget=4096", "train.max_skipped_updates=7", "train.lr=3e-6")
    assert critic_model(config) == config.model
    train, batch = critic_train(config), critic_batch(config)
    assert (train.lr, train.max_skipped_updates) == (1e-5, 7)
    assert (batch.token_budget, batch.forward_token_budget) == (4096, 8192)
    assert batch.layout == config.batch.layout


def test_the_critics_own_settings_leave_the_actors_alone() -> None:
    config = ppo(
        "critic.path=org/reward",
        "critic.lr=2e-5",
        "critic.betas=[0.8, 0.9]",
        "critic.token_budget=1024",
        "critic.num_epochs=4",
        "batch.mini_batch_prompts=4",
        "critic.pretrain_steps=10",
    )
    assert (critic_model(config).path, critic_model(config).revision) == ("org/reward", None)
    assert (critic_train(config).lr, critic_train(config).betas) == (2e-5, (0.8, 0.9))
    assert (config.train.lr, config.train.betas) == (1e-6, (0.9, 0.95))
    assert (critic_batch(config).token_budget, critic_batch(config).forward_token_budget) == (1024, 2048)
    assert critic_epochs(config) == 4
    assert num_critic_updates(config) == 100 * 4 * 4
    assert batch_arithmetic(config).total_updates == 90 * 4


def test_the_critics_budget_holds_the_longest_real_sample() -> None:
    config = ppo("critic.token_budget=300")
    assert check_lengths(config, 44, None) == 300
    with pytest.raises(ConfigError) as caught:
        check_lengths(config, 45, None)
    assert caught.value.key == "critic.token_budget"


def test_a_dry_run_shows_the_critic() -> None:
    text = describe(ppo("critic.pretrain_steps=10", "critic.num_epochs=2"))
    assert "1 mini-batches x 2 epochs x 100 steps = 200, alone in the first 10" in text
    assert "critic" not in describe(load_config(None, base=BASE))
