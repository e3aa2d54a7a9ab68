"""Section `reward`: typed sources, refusals that name the setting, and what `--dry-run` says of them."""

from typing import Any

import pytest

from paceline.config import Config, ConfigError, load_config
from paceline.config.arithmetic import describe
from paceline.config.loading import dump_config
from paceline.config.rewards import rule_names

BASE = {"model": {"path": "org/model"}, "task": {"path": "prompts.jsonl"}}


def with_sources(sources: dict[str, Any], *overrides: str) -> Config:
    return load_config(None, overrides, base=BASE, sections={"reward": {"sources": sources}})


def refusal(sources: dict[str, Any], *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        with_sources(sources, *overrides)
    return caught.value


def test_sources_are_typed_and_survive_being_written() -> None:
    config = with_sources(
        {
            "format": {"kind": "rule", "name": "my:format", "weight": 0.1},
            "taste": {"kind": "model", "path": "org/reward", "quantization": "int8", "optional": True},
            "judge": {"kind": "judge", "path": "org/judge", "score_key": "score"},
            "sandbox": {"kind": "remote", "url": "https://host/score", "timeout_s": 5},
        }
    )
    assert [source.kind for source in config.reward.sources.values()] == ["rule", "model", "judge", "remote"]
    text = dump_config(config)
    assert Config.model_validate(config.model_dump()) == config and "https://host/score" in text


def test_a_source_is_set_from_the_command_line() -> None:
    overrides = ["reward.sources.rm.kind=model", "reward.sources.rm.path=org/reward"]
    config = load_config(None, [*overrides, "reward.sources.rm.weight=0.5"], base=BASE)
    assert config.reward.sources["rm"].weight == 0.5


@pytest.mark.parametrize(
    ("source", "key", "nearest"),
    [
        ({}, "a.kind", "rule"),
        ({"kind": "modl"}, "a.kind", "model"),
        ({"kind": "model", "path": "m", "pth": "x"}, "a.pth", "path"),
        ({"kind": "model", "path": "m", "quantization": "int4"}, "a.quantization", "int8"),
        ({"kind": "model"}, "a.path", None),
        ({"kind": "model", "path": "m", "token_budget": 0}, "a.token_budget", "1"),
        (
            {"kind": "judge", "path": "m", "quantization": "nf4", "host_between_uses": True},
            "a.host_between_uses",
            "false",
        ),
        (
            {"kind": "judge", "path": "m", "score_pattern": r"\d"},
            "a.score_pattern",
            r"Score: ([0-9.]+)",
        ),
        ({"kind": "judge", "path": "m", "score_pattern": "(", "lowest": 0}, "a.score_pattern", None),
        ({"kind": "judge", "path": "m", "score_pattern": "(.)", "score_key": "s"}, "a.score_key", "null"),
        ({"kind": "judge", "path": "m", "lowest": 2, "highest": 1}, "a.lowest", None),
        ({"kind": "rule", "name": "https://host/x"}, "a.name", "kind: remote"),
        ({"kind": "rule", "name": "reasoning_gym"}, "a.name", "null"),
        ({"kind": "remote", "url": "host/score"}, "a.url", None),
        ({"kind": "remote", "url": "ftp://host/score"}, "a.url", None),
        ({"kind": "remote", "url": "https://host:port/score"}, "a.url", None),
        ({"kind": "remote", "url": "https://host/", "auth_header": "X: y"}, "a.auth_header", "Authorization"),
    ],
)
def test_a_malformed_source_is_refused_by_its_setting(
    source: dict[str, Any], key: str, nearest: str | None
) -> None:
    problem = refusal({"a": source})
    assert problem.key == f"reward.sources.{key}" and problem.nearest == nearest


def test_a_name_that_no_metric_can_have_is_refused() -> None:
    assert refusal({"My judge": {"kind": "rule", "name": "a:b"}}).nearest == "my_judge"


def test_plain_http_to_another_machine_is_refused_unless_allowed() -> None:
    source = {"kind": "remote", "url": "http://sandbox:8000/score"}
    assert "https://sandbox:8000/score" in str(refusal({"sandbox": source}).nearest)
    with_sources({"sandbox": {**source, "allow_http": True}})
    for here in ("http://localhost:8000/score", "http://127.0.0.1/x", "http://[::1]:8/x"):
        with_sources({"sandbox": {"kind": "remote", "url": here}})


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    problem = refusal({"a": {"kind": "remote", "url": "https://user:hunter2@host/score"}})
    assert problem.key == "reward.sources.a.url" and "hunter2" not in str(problem)


def test_an_address_as_task_reward_is_one_remote_source() -> None:
    config = load_config(None, ["task.reward=https://host/score"], base=BASE)
    assert "reward remote" in describe(config)
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["task.reward=http://host/score"], base=BASE)
    assert caught.value.key == "task.reward"


def test_task_reward_is_the_rule_of_a_source_without_a_name() -> None:
    sources = {"task": {"kind": "rule"}, "format": {"kind": "rule", "name": "my:format"}}
    config = with_sources(sources, "task.reward=my:score")
    assert rule_names(config, "my:score") == {"task": "my:score", "format": "my:format"}
    assert refusal({"rm": {"kind": "model", "path": "m"}}, "task.reward=math").key == "task.reward"


def test_optional_needs_another_source_and_a_comparison_within_groups() -> None:
    rule, optional = {"kind": "rule"}, {"kind": "model", "path": "m", "optional": True}
    with_sources({"rule": rule, "rm": optional})
    assert refusal({"rm": optional}).key == "reward.sources.rm.optional"
    problem = refusal({"rule": rule, "rm": optional}, "algorithm.name=ppo")
    assert problem.key == "reward.sources.rm.optional" and "gae" in problem.rule


def test_a_dry_run_prints_every_source() -> None:
    config = with_sources(
        {
            "rule": {"kind": "rule", "weight": 0.2},
            "rm": {"kind": "model", "path": "org/rm", "quantization": "nf4", "optional": True},
        }
    )
    text = describe(config)
    assert "reward rule" in text and "0.2 x rule auto" in text
    assert "1 x reward model org/rm in nf4, 16,384 tokens a pass, optional" in text


def test_sources_mean_nothing_to_supervised_fine_tuning() -> None:
    assert refusal({"r": {"kind": "rule"}}, "schedule.name=sft").key == "reward.sources"
