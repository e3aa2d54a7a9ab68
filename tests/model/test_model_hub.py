"""A model that can come from nowhere is refused at once, with what was tried; the Hub's client is not left to retry."""

from pathlib import Path

import pytest
from huggingface_hub import constants
from tiny_runs import write_tiny_model

from paceline.config import ConfigError
from paceline.config.schema import ModelSection
from paceline.model import hub
from paceline.model.hub import check_can_be_found
from paceline.model.loading import load_hf_config, load_tokenizer


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A Hub that refuses the connection, and an empty working folder."""
    endpoint = "http://127.0.0.1:9"  # the port of the discard service, which nobody runs
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return endpoint


@pytest.mark.parametrize("load", [load_hf_config, load_tokenizer])
@pytest.mark.parametrize("name", ["smollm", "team/smollm"])
def test_a_mistyped_model_is_refused_with_what_was_tried(
    nobody_answers: str, tmp_path: Path, load: object, name: str
) -> None:
    assert callable(load)
    with pytest.raises(ConfigError) as refused:
        load(ModelSection(path=name))
    assert refused.value.key == "model.path"
    for tried in (str(tmp_path), constants.HF_HUB_CACHE, nobody_answers):
        assert tried in refused.value.rule


def test_the_nearest_folder_that_holds_a_model_is_named(nobody_answers: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "smollm2")
    (tmp_path / "smollm1").mkdir()
    for name in ("smolm2", "./smolm2"):
        with pytest.raises(ConfigError) as refused:
            check_can_be_found(name, "model.path")
        assert refused.value.nearest == "smollm2"
    check_can_be_found("smollm2", "model.path")


def test_a_name_that_the_hub_cannot_have_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_why_unreachable", lambda endpoint: pytest.fail("the network was asked"))
    with pytest.raises(ConfigError, match="no model on the Hub can have this name"):
        check_can_be_found("runs/own/checkpoints/final", "model.path")


def test_offline_mode_is_named_as_the_reason(nobody_answers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_can_be_found("smollm", "model.path")
