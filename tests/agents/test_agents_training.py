"""Training on episodes: tools and programs through whole runs, with tiny models."""

import json
import sys
from pathlib import Path

import pytest
from tiny_runs import tiny_sections
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from paceline.config import ConfigError, load_config
from paceline.rollout.recording import ReplayEngine
from paceline.schedules import run_training
from paceline.telemetry.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
NUM_CALLS = 40


def calling_tokenizer(folder):
    """Half of the words are calls, and an answer ends with each of them: random weights call tools, too."""
    words = [f"<echo>w{i}</echo>" for i in range(NUM_CALLS)] + [f"w{i}" for i in range(94 - NUM_CALLS)]
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def episode_config(tmp_path, agent, **changes):
    sections = tiny_sections(
        tmp_path,
        agent=agent,
        rollout={
            "max_new_tokens": 24,
            "stop_token_ids": list(range(3, 3 + NUM_CALLS)),
            "record": str(tmp_path / "recorded"),
            **changes.pop("rollout", {}),
        },
        **changes,
    )
    calling_tokenizer(tmp_path / "model")
    return load_config(sections=sections)


def values_of(run_dir, name):
    return [record.metrics[name] for record in read_metrics(run_dir) if name in record.metrics]


def recorded_samples(tmp_path, steps):
    engine = ReplayEngine(tmp_path / "recorded")
    for step in range(1, steps + 1):
        engine.seek(step)
        yield from (sample for sample, _ in engine._found.values())


TOOLS = {
    "tools": ["tiny_agents:echo", "tiny_agents:slow"],
    "call_format": "tag",
    "max_turns": 3,
    "workers": 1,
}


@pytest.mark.parametrize("cache", ["slots", "paged"])
def test_a_run_trains_on_episodes_and_their_tokens_are_the_trainers(tmp_path, cache):
    config = episode_config(tmp_path, TOOLS, rollout={"cache": cache})
    result = run_training(config)
    assert result.summary["status"] == "completed"
    samples = list(recorded_samples(tmp_path, 3))
    called = [sample for sample in samples if 0 in sample.loss_mask]
    assert len(samples) == 48 and called
    for sample in called:
        first = sample.loss_mask.index(0)
        assert 3 <= sample.token_ids[first - 1] < 3 + NUM_CALLS  # a call ended the answer
        output = sample.token_ids[first]
        assert output == sample.token_ids[first - 1] + NUM_CALLS or output == 0 or output >= 3 + NUM_CALLS
        assert sample.loss_mask[-1] == 1 and len(sample.token_ids) <= 24
    inserted = sum(sample.loss_mask.count(0) for sample in samples)
    assert sum(values_of(result.run_dir, "agent/inserted_tokens")) == inserted
    assert sum(values_of(result.run_dir, "tokens/loss")) == sum(sum(s.loss_mask) for s in samples)
    assert max(values_of(result.run_dir, "rollout/logprob_difference_max")) < 1e-4
    assert max(values_of(result.run_dir, "agent/turns")) > 1


def test_waiting_for_tools_is_a_stage_of_its_own(tmp_path):
    agent = {**TOOLS, "tools": ["tiny_agents:slow"]}
    words = [f"<slow>w{i}</slow>" for i in range(NUM_CALLS)]
    config = episode_config(tmp_path, agent, run={"num_steps": 1}, task={"eval_size": 0})
    path = tmp_path / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace("<echo>", "<slow>").replace("</echo>", "</slow>"))
    assert words[0] in path.read_text()
    result = run_training(config)
    text = (result.run_dir / "ledger" / "rank0.jsonl").read_text()
    assert '"tools"' in text
    assert max(values_of(result.run_dir, "time/tools")) >= 0.25


def test_episodes_are_the_same_whatever_runs_beside_them(tmp_path):
    found = []
    for name, running in (("a", 2), ("b", 64)):
        folder = tmp_path / name
        folder.mkdir()
        config = episode_config(
            folder, TOOLS, run={"num_steps": 1}, task={"eval_size": 0}, rollout={"max_running": running}
        )
        run_training(config)
        found.append({(s.prompt_id, s.seed): s.token_ids for s in recorded_samples(folder, 1)})
    assert found[0] == found[1]


def program_config(tmp_path, program):
    agent = {"program": f"tiny_agents:{program}", "workers": 2, "timeout_s": 240.0}
    return episode_config(
        tmp_path,
        agent,
        run={"num_steps": 1},
        task={"eval_size": 0},
        batch={"num_prompts": 2, "num_samples": 2},
    )


def test_an_openai_clients_episode_becomes_a_sample_with_its_exact_tokens(tmp_path):
    result = run_training(program_config(tmp_path, "two_questions"))
    samples = list(recorded_samples(tmp_path, 1))
    assert len(samples) == 4
    for sample in samples:
        inserted = sample.loss_mask.index(0)
        assert sample.loss_mask[0] == sample.loss_mask[-1] == 1 and 1 <= inserted <= 3
        assert sample.token_ids[sample.loss_mask.count(0) + inserted - 1] == 2 + NUM_CALLS + 10  # "w9"
        assert sample.prompt_token_ids == ()
    assert max(values_of(result.run_dir, "rollout/logprob_difference_max")) < 1e-4
    assert values_of(result.run_dir, "agent/turns") == [2]


@pytest.mark.parametrize(
    ("program", "field"), [("fails_half_way", "errors"), ("asks_nothing", "without_turn")]
)
def test_half_an_episode_is_counted_and_teaches_nothing(tmp_path, program, field):
    config = program_config(tmp_path, program)
    # every mini-batch is without a loss token, and a run that trains nothing fails
    with pytest.raises(Exception, match="single optimiser update"):
        run_training(config)
    samples = list(recorded_samples(tmp_path, 1))
    assert all(set(sample.loss_mask) == {0} and sample.finish_reason == "abort" for sample in samples)
    assert values_of(Path(config.run.dir) / config.run.name, f"agent/{field}") == [4]


@pytest.mark.parametrize("several_sources", [False, True])
def test_an_episode_whose_program_failed_is_in_no_statistic_of_its_group(tmp_path, several_sources):
    config = program_config(tmp_path, "fails_after_some_answers")
    sections = config.model_dump(exclude_unset=True)
    sections["batch"] |= {"num_prompts": 4, "num_samples": 4}
    if several_sources:
        rule = {"kind": "rule", "name": sections["task"].pop("reward")}
        sections["reward"] = {"sources": {"one": rule, "two": {**rule, "optional": True}}}
    result = run_training(load_config(None, sections=sections))
    rows = [
        json.loads(line) for line in (result.run_dir / "samples" / "step1.jsonl").read_text().splitlines()
    ]
    failed = [row for row in rows if row["finish_reason"] == "abort"]
    assert 0 < len(failed) < len(rows)
    assert {(row["outcome"], row["score"], row["advantage"]) for row in failed} == {("aborted", None, 0.0)}
    for prompt_id in {row["prompt_id"] for row in rows}:
        whole = [row for row in rows if row["prompt_id"] == prompt_id and row not in failed]
        assert sum(row["advantage"] for row in whole) == pytest.approx(0.0, abs=1e-5)
    (metrics,) = (r.metrics for r in read_metrics(result.run_dir) if r.step == 1)
    assert metrics["samples/without_verdict"] == metrics["samples/aborted"] == len(failed)
    assert metrics["reward/errors"] == 0


def test_another_temperature_than_the_trained_one_is_refused_to_the_client(tmp_path):
    config = program_config(tmp_path, "wants_another_temperature")
    run_training(config)
    assert {sample.text for sample in recorded_samples(tmp_path, 1)} == {"refused temperature"}


@pytest.mark.parametrize(
    ("agent", "key"),
    [
        ({"max_turns": 3}, "agent.tools"),
        ({"tools": ["tiny_agents:echo"], "program": "tiny_agents:two_questions"}, "agent.program"),
        ({"program": "tiny_agents:two_questions", "max_turns": 3}, "agent.max_turns"),
        ({"tools": ["echo"]}, "agent.tools"),
        ({"tools": ["tiny_agents:echo"], "max_turn_tokens": 9999}, "agent.max_turn_tokens"),
        ({"tools": ["tiny_agents:echo"], "examples": [{"role": "user"}]}, "agent.examples"),
    ],
)
def test_agent_settings_that_contradict_or_do_nothing_are_refused(tmp_path, agent, key):
    with pytest.raises(ConfigError) as raised:
        load_config(sections=tiny_sections(tmp_path, agent=agent))
    assert key in str(raised.value)


def test_a_tool_that_does_not_exist_is_refused_before_the_model_is_loaded(tmp_path):
    config = load_config(sections=tiny_sections(tmp_path, agent={"tools": ["tiny_agents:nothing"]}))
    with pytest.raises(ConfigError, match="no function"):
        run_training(config)
