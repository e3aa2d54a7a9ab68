"""A reward model scores packed, padded and one by one as transformers does, read at the last real token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES
from tiny_reward_model import RATED_TEMPLATE, conversations, job, write_tiny_reward_model
from tiny_runs import write_tiny_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from paceline.config import Config, ConfigError, load_config
from paceline.config.schema import ModelSection
from paceline.engine.model_engine import ModelEngine
from paceline.model.loading import load_tokenizer
from paceline.model.packing_probe import probe_value_packing
from paceline.model.value_head import ValueModel, load_reward_model
from paceline.reward_models.classifier import ClassifierScorer, Conversation
from paceline.reward_models.conversation import check_template, render_conversation, shared_length
from paceline.telemetry.ledger import Ledger
from paceline.types import RewardJob, Verdict

CPU = torch.device("cpu")
BASE = ["task.path=x", "rollout.max_new_tokens=6"]


def opened(folder: Path, *overrides: str, max_tokens: int = 127, **settings: Any) -> ClassifierScorer:
    config = load_config(None, [*BASE, *overrides], {"model": {"path": str(folder)}})
    model = load_reward_model(config.model, CPU, "reward.sources.rm.path")
    return scorer_of(model, config, max_tokens=max_tokens, **settings)


def scorer_of(model: ValueModel, config: Config, **settings: Any) -> ClassifierScorer:
    ledger = Ledger()
    engine = ModelEngine(model, config.train, config.batch, ledger, None)
    return ClassifierScorer(
        model, load_tokenizer(config.model), engine, ledger, **{"max_tokens": 127, **settings}
    )


def scores(scorer: ClassifierScorer, jobs: list[RewardJob]) -> list[float | None]:
    return [verdict.score for verdict in verdicts(scorer, jobs)]


def verdicts(scorer: ClassifierScorer, jobs: list[RewardJob]) -> list[Verdict]:
    pending = [scorer.submit(one) for one in jobs]
    assert not any(handle.done() for handle in pending)  # one pass for all, and not one for each
    scorer.flush()
    return [handle.result(0) for handle in pending]


def stock_scores(folder: Path, jobs: list[RewardJob], padding_side: str) -> list[float]:
    """transformers' own forward pass over one padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=padding_side)
    tokenizer.pad_token = "w93"  # occurs in no conversation, or transformers would read elsewhere
    module = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    module.config.pad_token_id = tokenizer.pad_token_id
    chats = [[*one.messages, {"role": "assistant", "content": one.completion}] for one in jobs]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return [float(score) for score in module(**batch).logits[:, 0]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_scores_are_those_of_transformers_whatever_the_padding_side(tmp_path: Path, family: str) -> None:
    folder = write_tiny_reward_model(tmp_path, family)
    found = scores(opened(folder), conversations())
    assert len({round(score or 0.0, 3) for score in found}) == len(found)
    for side in ("left", "right"):
        assert found == pytest.approx(stock_scores(folder, conversations(), side), abs=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.share_prefixes=false"],
        ["batch.token_budget=16", "batch.forward_token_budget=24"],
        ["batch.layout=padded"],
        ["batch.layout=padded", "batch.pad_to=mini_batch"],
    ],
    ids=" ".join,
)
def test_scores_do_not_depend_on_how_conversations_are_laid_out(tmp_path: Path, overrides: list[str]) -> None:
    folder = write_tiny_reward_model(tmp_path)
    scorer = opened(folder)
    alone = [scores(scorer, [one])[0] for one in conversations()]
    assert scores(scorer, conversations()) == pytest.approx(alone, abs=1e-5)
    assert scores(opened(folder, *overrides), conversations()) == pytest.approx(alone, abs=1e-5)
    backwards = scores(scorer, conversations()[::-1])
    assert backwards[::-1] == pytest.approx(alone, abs=1e-5)


def test_the_last_real_token_is_found_by_length_and_not_by_its_id(tmp_path: Path) -> None:
    # the template ends with </s>, which is this tokenizer's padding token as well
    folder = write_tiny_reward_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = render_conversation(tokenizer, conversations()[0])
    assert ids[-1] == tokenizer.pad_token_id == tokenizer.eos_token_id
    module = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = module.base_model(torch.tensor([ids])).last_hidden_state
        at_the_end = float(module.score(hidden)[0, -1, 0])
    assert scores(opened(folder), conversations()[:1]) == pytest.approx([at_the_end], abs=1e-5)


def test_the_reward_models_own_template_renders_the_conversation(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_reward_model(tmp_path))
    assert tokenizer.chat_template == RATED_TEMPLATE
    text = tokenizer.decode(render_conversation(tokenizer, job("w1 w2", "w3")))
    assert text == "<s> w90 <s> w1 w2 <s> w3 </s>"
    bare = RewardJob("w5", "w6")  # a prompt that was never a conversation is one question
    assert tokenizer.decode(render_conversation(tokenizer, bare)) == "<s> w5 <s> w6 </s>"


def test_a_shared_prompt_is_computed_once(tmp_path: Path) -> None:
    assert shared_length([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3)]) == 2
    assert shared_length([(1, 2, 3)]) == 2 and shared_length([(7,)]) == 1
    assert shared_length([(1, 2), (1, 2, 3)]) == 1  # the shorter one keeps a token of its own
    assert shared_length([(1, 2), (3, 4)]) == 1
    assert Conversation.split((1, 2, 3), 2).response_ids == (3, 0)
    scorer = opened(write_tiny_reward_model(tmp_path))
    with scorer._ledger.step(1):
        scores(scorer, conversations()[:2])
    section = scorer._ledger.last_section
    assert section is not None
    # once: w90, the question, their marks, the answer's mark and w4, with which both answers begin; each: what follows
    # it, the end and the appended token
    assert section.stage_tokens["reward"] == 8 + 2 + (7 + 2) and section.stage_flops["reward"] > 0


def test_a_conversation_that_is_too_long_is_an_error_and_not_cut_off(tmp_path: Path) -> None:
    scorer = opened(write_tiny_reward_model(tmp_path), max_tokens=10)
    found = verdicts(scorer, [job("w1", "w2"), job("w1", "w2 " * 20)])
    assert [verdict.outcome for verdict in found] == ["score", "error"]
    assert "at most 10" in found[1].message and scorer.take_counts() == {"overlong": 1}
    assert scorer.take_counts() == {"overlong": 0}


def test_a_template_that_refuses_one_conversation_makes_it_an_error(tmp_path: Path) -> None:
    scorer = opened(write_tiny_reward_model(tmp_path))
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}w1 w2"
    scorer._tokenizer.chat_template = strict
    found = verdicts(scorer, [job("w1", "w2"), RewardJob("w3", "w4")])
    assert [verdict.outcome for verdict in found] == ["error", "score"] and "no system turn" in found[
        0
    ].message
    with pytest.raises(ConfigError) as caught:
        check_template(scorer._tokenizer, job("w1", "w2"), "reward.sources.rm.chat_template")
    assert caught.value.key == "reward.sources.rm.chat_template"
    scorer._tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        check_template(scorer._tokenizer, job("w1", "w2"), "k")


def test_nothing_to_score_costs_nothing(tmp_path: Path) -> None:
    scorer = opened(write_tiny_reward_model(tmp_path))
    scorer.flush()
    assert scores(scorer, []) == []


def test_weights_on_the_host_between_uses_score_alike(tmp_path: Path) -> None:
    folder = write_tiny_reward_model(tmp_path)
    assert scores(opened(folder, host_between_uses=True), conversations()) == scores(
        opened(folder), conversations()
    )


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    settings = ModelSection(path=str(write_tiny_model(tmp_path)))
    with pytest.raises(ConfigError) as caught:
        load_reward_model(settings, CPU, "reward.sources.rm.path")
    assert caught.value.key == "reward.sources.rm.path" and "judge" in str(caught.value.nearest)


def test_a_classifier_of_several_classes_is_refused_by_the_sources_key(tmp_path: Path) -> None:
    settings = ModelSection(path=str(write_tiny_reward_model(tmp_path, num_labels=3)))
    with pytest.raises(ConfigError) as caught:
        load_reward_model(settings, CPU, "reward.sources.rm.path")
    assert caught.value.key == "reward.sources.rm.path" and "3 labels" in caught.value.rule


def test_the_packing_probe_takes_reward_models(tmp_path: Path) -> None:
    model = load_reward_model(ModelSection(path=str(write_tiny_reward_model(tmp_path, "gemma2"))), CPU, "k")
    probe_value_packing(model, "k")
    assert FAMILIES["gemma2"].model_type == model.family.model_type
