"""Numbers are numbers by every route; what is unknown, doubled or of the wrong type is refused with advice."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.config import Config, ConfigError, dump_config, explain, load_config
from paceline.config.presets import PRESETS
from paceline.config.schema import AUTO_TOKEN_BUDGET
from paceline.config.yaml_scalars import parse_yaml, write_yaml

BASE: dict[str, Any] = {"model": {"path": "org/model"}, "task": {"name": "word_sorting"}}


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{path: org/model}}\ntask: {{name: word_sorting}}\n{text}")
    return path


def refusal(overrides: list[str] | None = None, **sections: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides or [], base=BASE, sections=sections)
    return caught.value


@pytest.mark.parametrize("spelled", ["1e-6", "1E-6", "1.0e-6", "1.e-6", "0.000001", "+1e-06", ".1e-5"])
def test_a_learning_rate_is_a_number_by_every_route(tmp_path: Path, spelled: str) -> None:
    by_recipe = load_config(recipe(tmp_path, f"train:\n  lr: {spelled}\n"))
    by_flow_style = load_config(recipe(tmp_path, f"train: {{lr: {spelled}}}\n"))
    by_override = load_config(None, [f"train.lr={spelled}"], base=BASE)
    by_python = load_config(None, base=BASE, sections={"train": {"lr": float(spelled)}})
    for config in (by_recipe, by_flow_style, by_override, by_python):
        assert config.train.lr == 1e-6
    assert load_config(None, base=parse_yaml(dump_config(by_recipe))).train.lr == 1e-6


def test_numbers_inside_lists_and_free_parameters_are_numbers_too() -> None:
    config = load_config(
        None, ["train.betas=[9e-1, 95e-2]", "task.params.x=1e3", "task.params.y={z: 5e-1}"], base=BASE
    )
    assert config.train.betas == (0.9, 0.95)
    assert config.task.params == {"x": 1000.0, "y": {"z": 0.5}}


def test_words_that_yaml_1_1_takes_for_booleans_or_times_stay_words() -> None:
    config = load_config(None, ["telemetry.live=on", "task.params.a=no", "task.params.b=1:30"], base=BASE)
    assert config.telemetry.live == "on"
    assert config.task.params == {"a": "no", "b": "1:30"}
    assert parse_yaml("010") == 10


def test_a_setting_that_holds_text_takes_a_number_on_the_command_line_as_text() -> None:
    config = load_config(None, ["run.name=2024", "task.instruction=1e-6", "model.revision=null"], base=BASE)
    assert (config.run.name, config.task.instruction, config.model.revision) == ("2024", "1e-6", None)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@example({"\x85": "a\u2028b\u2029\x85", "\ufeff": "\ufeff"})
@given(st.dictionaries(st.text(min_size=1), scalars | st.lists(scalars), max_size=4))
@settings(max_examples=150, deadline=None)
def test_what_the_writer_writes_the_reader_reads_back(value: dict[str, Any]) -> None:
    assert parse_yaml(write_yaml(value)) == value


@given(
    st.sampled_from(
        ["1e-6", "on", "0o17", "1_000", "2024-01-01", "1:30", "null", "~", "", "=", "<<", ".inf", "0x1f"]
    )
)
def test_text_that_looks_like_another_type_survives_both_yaml_versions(text: str) -> None:
    written = write_yaml({"value": text})
    assert parse_yaml(written) == yaml.safe_load(written) == {"value": text}


def test_a_dumped_config_loads_to_an_equal_one() -> None:
    overrides = [
        "train.lr=3e-5",
        "task.params.words=[1, 2]",
        "task.system_prompt=on: 1e-6\n\ttabs",
        "task.eval_size=0",
    ]
    config = load_config(None, overrides, base=BASE)
    assert load_config(None, base=parse_yaml(dump_config(config))) == config


def test_later_layers_win_and_mappings_merge(tmp_path: Path) -> None:
    path = recipe(tmp_path, "train: {lr: 2.0, eps: 2.0}\nrun: {seed: 2}\n")
    base = {"train": {"lr": 1.0, "eps": 1.0, "grad_clip": 1.5}}
    config = load_config(
        path, ["run.seed=4", "run.seed=5"], base=base, sections={"run": {"seed": 3}, "train": {"lr": 3}}
    )
    assert (config.train.lr, config.train.eps, config.train.grad_clip, config.run.seed) == (3.0, 2.0, 1.5, 5)
    assert base == {"train": {"lr": 1.0, "eps": 1.0, "grad_clip": 1.5}}


@pytest.mark.parametrize("text", ["", "train:\n", "train: {}\n"])
def test_empty_sections_are_defaults(tmp_path: Path, text: str) -> None:
    assert load_config(recipe(tmp_path, text)).train == Config().train


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("train.lerning_rate=1e-6", "train.lerning_rate", "train.lr"),
        ("train.learning_rate=1e-6", "train.learning_rate", "train.lr"),
        ("train.grad_clp=1", "train.grad_clp", "train.grad_clip"),
        ("train.temperature=1", "train.temperature", "rollout.temperature"),
        ("trian.lr=1", "trian", "train"),
        ("lr=1", "lr", "train.lr or critic.lr"),
        ("learning_rate=1", "learning_rate", "train.lr"),
        ("batch.num_generations=8", "batch.num_generations", "batch.num_samples"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_coef", "algorithm.kl_coefficient"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(override: str, key: str, nearest: str) -> None:
    error = refusal([override])
    assert (error.key, error.nearest) == (key, nearest)


def test_an_unknown_key_of_a_recipe_names_key_value_section_and_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(tmp_path, "train: {lerning_rate: 1e-6}\n"))
    assert (
        str(caught.value) == "train.lerning_rate = 1e-06: section train has no such key (nearest: train.lr)"
    )


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.lr=abc", None),
        ("train.lr='1e-6'", "1e-06 without quotes"),
        ("train.lr=true", None),
        ("train.lr=.inf", None),
        ("train.lr=.nan", None),
        ("train.lr=-1", "0.0"),
        ("batch.num_samples=2.5", None),
        ("batch.num_samples=true", None),
        ("batch.num_samples=0", "1"),
        ("batch.num_samples='8'", "8 without quotes"),
        ("batch.layout=paked", "packed"),
        ("batch.share_prefixes=1", None),
        ("algorithm.loss=ppo", None),
        ("rollout.top_p=1.5", "1.0"),
        ("run.name=null", None),
    ],
)
def test_wrong_values_are_refused_under_their_key_and_never_converted(
    override: str, nearest: str | None
) -> None:
    error = refusal([override])
    assert error.key == override.partition("=")[0]
    if nearest is not None:
        assert error.nearest == nearest


def test_text_in_a_recipe_that_yaml_reads_as_a_number_asks_for_quotes(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"run\.name = 2024: must be a valid string \(nearest: '2024' in quotes\)"
    ):
        load_config(recipe(tmp_path, "run: {name: 2024}\n"))


def test_all_problems_are_shown_one_line_each() -> None:
    error = refusal(["batch.num_prompts=0", "train.lr=abc", "rollout.top_p=2"])
    assert [problem.key for problem in error.problems] == ["batch.num_prompts", "rollout.top_p", "train.lr"]
    assert len(str(error).splitlines()) == 3
    assert [p.key for p in refusal(run={"nme": "x"}, trian={}).problems] == ["run.nme", "trian"]


def test_a_refusal_survives_pickling() -> None:
    error = refusal(["batch.num_prompts=0", "train.lr=abc"])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("text", "key"),
    [("train: {lr: 1, lr: 2}\n", "lr"), ("run: {}\nrun: {}\n", "run"), ("task: {name: a}\n", "task")],
)
def test_keys_written_twice_are_refused(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigError, match="is written twice") as caught:
        load_config(recipe(tmp_path, text))
    assert caught.value.key == key


@pytest.mark.parametrize(
    "override", ["train.lr", "=1", ".lr=1", "train.=1", "train=1", "train.lr.x=1", "train.lr=[1"]
)
def test_malformed_overrides_are_refused(override: str) -> None:
    refusal([override])


@pytest.mark.parametrize(
    "content", [b"- a\n- b\n", b"just text", b"train: [1\n", b"\xff\xfe\x00", b"train: 3\n"]
)
def test_files_that_are_no_recipe_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_config(path)


def test_a_missing_recipe_names_the_nearest_file(tmp_path: Path) -> None:
    path = recipe(tmp_path, "")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "recpie.yaml")
    assert caught.value.key == "recipe" and caught.value.nearest == str(path)


def test_yaml_cannot_build_python_objects(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(recipe(tmp_path, "run: !!python/object/apply:os.getcwd []\n"))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_fills_what_is_unset_and_gives_way_to_what_is_set(name: str) -> None:
    algorithm = load_config(None, [f"algorithm.name={name}"], base=BASE).algorithm
    for key, value in PRESETS[name].items():
        assert getattr(algorithm, key) == value
    changed = load_config(None, [f"algorithm.name={name}", "algorithm.clip_low=0.123"], base=BASE).algorithm
    assert changed == algorithm.model_copy(update={"clip_low": 0.123})


def test_configs_are_frozen() -> None:
    config = load_config(None, base=BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]


def test_every_setting_is_explained() -> None:
    rows = explain()
    assert {name.partition(".")[0] for name, *_ in rows} == set(Config.model_fields)
    for name, kind, default, description in rows:
        assert kind and default and description.endswith("."), name
    assert "rollout.vllm.max_num_seqs" in {name for name, *_ in rows}  # of a section within a section


@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_token_budget_is_a_positive_number_or_auto(value: str) -> None:
    with pytest.raises(ConfigError, match="must be at least 1, or auto"):
        load_config(None, [f"batch.token_budget={value}"], base=BASE)
    config = load_config(None, ["batch.token_budget=auto"], base=BASE)
    assert config.batch.token_budget == AUTO_TOKEN_BUDGET
    assert "token_budget: auto" in dump_config(config)


@pytest.mark.parametrize(
    "sections",
    [{}, {"agent": {"tools": ["my_tools:search"]}}, {"agent": {"program": "my_agent:play"}}],
    ids=["no episodes", "tools", "program"],
)
def test_a_written_config_is_read_again_and_is_the_same(tmp_path: Path, sections: dict[str, Any]) -> None:
    config = load_config(None, base=BASE, sections=sections)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
