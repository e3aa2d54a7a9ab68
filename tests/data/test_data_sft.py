"""Supervised rows: exactly the assistant's tokens are learned, after exactly the context a rollout would see."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import make_tokenizer

from paceline.config import ConfigError, load_sft_config
from paceline.data.assistant_mask import PrefixViolationError, TurnTokenizer
from paceline.data.loader import PromptLoader
from paceline.data.sft import SftRow, build_sft_data

TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "bye bye"},
]
LINE_BREAK_AFTER_END = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETS_EARLIER_ANSWERS = (
    "{% for message in messages %}<s>{{ message['role'] }}\n"
    "{{ message['content'] if message['role'] != 'assistant' or loop.last else '...' }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build(path, rows, tokenizer=None, context=1000, **sections):
    sections["model"] = {"path": "tiny", **sections.get("model", {})}
    sections["task"] = {"path": write(path / "rows.jsonl", rows), "eval_size": 0, **sections.get("task", {})}
    return build_sft_data(load_sft_config(None, sections=sections), tokenizer or make_tokenizer(), context)


def learned(row, tokenizer):
    """The learned tokens as text, one piece per run of learned tokens."""
    pieces, current = [], []
    for token, flag in zip((*row.token_ids, None), (*row.loss_mask, 0), strict=True):
        if flag:
            current.append(token)
        elif current:
            pieces.append(tokenizer.decode(current))
            current = []
    return pieces


def test_every_assistant_turn_is_learned_with_its_end_token_and_nothing_else(tmp_path):
    tokenizer = make_tokenizer()
    (row,) = build(tmp_path, [{"messages": TURNS}]).train
    assert learned(row, tokenizer) == ["hello you</s>", "bye bye</s>"]
    rendered = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert list(row.token_ids) == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_what_the_template_writes_after_the_end_token_is_not_learned(tmp_path):
    tokenizer = make_tokenizer(LINE_BREAK_AFTER_END)
    (row,) = build(tmp_path, [{"messages": TURNS}], tokenizer).train
    assert learned(row, tokenizer) == ["hello you</s>", "bye bye</s>"]


def test_learning_starts_where_a_rollout_would_start(tmp_path):
    tokenizer = make_tokenizer()
    (row,) = build(tmp_path, [{"prompt": "hello", "completion": "bye"}]).train
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    first = row.loss_mask.index(1)
    assert list(row.token_ids[:first]) == tokenizer(prompt, add_special_tokens=False)["input_ids"]


@given(
    st.lists(st.text(st.sampled_from("helo \n<s>/é中"), max_size=12), min_size=2, max_size=7),
    st.booleans(),
)
def test_learned_and_context_tokens_together_are_the_conversation_tokenised_once(contents, system):
    tokenizer = make_tokenizer()
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": "system", "content": "s"}] * system
    messages += [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    turns = TurnTokenizer(tokenizer, None, tokenizer.eos_token_id)
    found = turns.tokens(messages, "here")
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    assert list(found.token_ids) == whole["input_ids"]
    assert len(found.loss_mask) == len(found.token_ids)
    num_turns = sum(m["role"] == "assistant" for m in messages)
    starts = sum(b > a for a, b in zip((0, *found.loss_mask), found.loss_mask, strict=False))
    assert starts == num_turns


def test_a_template_that_rewrites_earlier_turns_is_refused_dropped_or_split(tmp_path):
    tokenizer = make_tokenizer(FORGETS_EARLIER_ANSWERS)
    rows = [{"messages": TURNS}, {"messages": TURNS[:3]}]
    with pytest.raises(ConfigError, match="split makes one row of every assistant turn") as refused:
        build(tmp_path, rows, tokenizer)
    assert refused.value.key == "sft.mismatched"
    dropped = build(tmp_path, rows, tokenizer, sft={"mismatched": "drop"})
    assert len(dropped.train) == 1 and dropped.counts.mismatched == 1
    split = build(tmp_path, rows, tokenizer, sft={"mismatched": "split"})
    assert [row.prompt_id for row in split.train] == ["row:0.0", "row:0.1", "row:1"]
    assert [learned(row, tokenizer) for row in split.train] == [
        ["hello you</s>"],
        ["bye bye</s>"],
        ["hello you</s>"],
    ]
    assert "..." in tokenizer.decode(split.train[1].token_ids)  # the context as a rollout would see it
    assert split.counts.split == 1 and split.counts.mismatched == 0


def test_a_tokenizer_that_merges_across_the_boundary_is_noticed():
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"  # "hel" + "lo" become one token
    turns = TurnTokenizer(make_tokenizer(template), None, 1)
    with pytest.raises(PrefixViolationError, match="context of message 1"):
        turns.tokens([{"role": "user", "content": "hel"}, {"role": "assistant", "content": "lo"}], "row 7")


def test_prompts_and_answers_come_from_any_of_the_usual_columns(tmp_path):
    tokenizer = make_tokenizer()
    rows = [
        {"prompt": "a", "completion": "one"},
        {"prompt": "b", "response": "two"},
        {"prompt": "c", "answer": "three"},
        {"prompt": "d", "answer": "three", "completion": "four"},
        {"prompt": [{"role": "user", "content": "e"}], "completion": [{"role": "assistant", "content": "f"}]},
    ]
    found = [learned(row, tokenizer)[0] for row in build(tmp_path, rows).train]
    assert found == ["one</s>", "two</s>", "three</s>", "four</s>", "f</s>"]
    named = build(
        tmp_path,
        [{"q": "a", "gold": {"text": "x"}}],
        task={"prompt_key": "q"},
        sft={"response_key": "gold.text"},
    )
    assert learned(named.train[0], tokenizer) == ["x</s>"]


def test_parquet_rows_are_read_alike(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"messages": TURNS}]), tmp_path / "rows.parquet")
    (tmp_path / "other").mkdir()
    from_parquet = build(tmp_path / "other", [], task={"path": str(tmp_path / "rows.parquet")})
    assert from_parquet.train[0].token_ids == build(tmp_path, [{"messages": TURNS}]).train[0].token_ids


def test_without_a_chat_template_the_prompt_is_tokenised_apart_and_the_end_token_is_learned(tmp_path):
    tokenizer = make_tokenizer()
    rows = [{"prompt": "hel", "completion": "lo"}]
    (row,) = build(tmp_path, rows, task={"use_chat_template": False}).train
    prompt = tokenizer("hel")["input_ids"]
    assert list(row.token_ids[: len(prompt)]) == prompt
    assert learned(row, tokenizer) == ["lo</s>"]
    with pytest.raises(ConfigError, match="only a chat template can render"):
        build(tmp_path, [{"messages": TURNS}], task={"use_chat_template": False})


def test_rows_that_are_too_long_are_refused_dropped_or_cut_and_counted(tmp_path):
    rows = [{"prompt": "hello", "completion": "hello" * 30}, {"prompt": "b", "completion": "c"}]
    with pytest.raises(ConfigError, match="more than the limit of 40") as refused:
        build(tmp_path, rows, sft={"max_length": 40})
    assert refused.value.key == "sft.overlong"
    dropped = build(tmp_path, rows, sft={"max_length": 40, "overlong": "drop"})
    assert dropped.counts.overlong_dropped == 1 and [r.prompt_id for r in dropped.train] == ["row:1"]
    cut = build(tmp_path, rows, sft={"max_length": 40, "overlong": "truncate"})
    whole = build(tmp_path, rows)
    assert cut.train[0].token_ids == whole.train[0].token_ids[:40] and cut.counts.truncated == 1
    assert cut.counts.tokens_truncated == len(whole.train[0].token_ids) - 40
    nothing = {"max_length": 5, "overlong": "truncate"}
    with pytest.raises(ConfigError, match="2 rows dropped without a token to learn"):
        build(tmp_path, rows, sft=nothing)
    with pytest.raises(ConfigError, match="at most 30 tokens"):
        build(tmp_path, rows, context=30, sft={"max_length": 40})


def test_a_template_without_an_end_token_is_said(tmp_path):
    template = (
        "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    )
    data = build(tmp_path, [{"messages": TURNS}], make_tokenizer(template))
    assert data.counts.without_end_token == 1
    assert any("does not learn to stop" in note for note in data.notes)


def test_held_out_rows_share_no_question_with_training_rows(tmp_path):
    rows = [{"prompt": f"q{index // 2}", "completion": f"a{index}"} for index in range(40)]
    data = build(tmp_path, rows, task={"eval_size": 5})
    assert len(data.evaluation) == 5 and data.counts.duplicates == 5
    context = {row.text.split("assistant")[0] for row in data.train}
    assert not context & {row.text.split("assistant")[0] for row in data.evaluation}
    again = build(tmp_path, rows[::-1], task={"eval_size": 5}, run={"seed": 3})
    assert {row.text.split("assistant")[0] for row in again.evaluation} == {
        row.text.split("assistant")[0] for row in data.evaluation
    }


def test_solved_reasoning_gym_questions_become_rows_and_examples_are_context_only(tmp_path):
    tokenizer = make_tokenizer()
    sections = {
        "model": {"path": "tiny"},
        "task": {"name": "word_sequence_reversal", "size": 8, "eval_size": 4, "num_examples": 2},
    }
    data = build_sft_data(load_sft_config(None, sections=sections), tokenizer, 10_000)
    assert (len(data.train), len(data.evaluation)) == (8, 4)
    for row in data.train:
        assert len(learned(row, tokenizer)) == 1  # the two shown answers are not learned
        assert row.text.count("<s>assistant") == 3


@pytest.mark.parametrize(
    "row, key, match",
    [
        ({"messages": TURNS[:2]}, "sft.messages_key", "no assistant turn"),
        ({"messages": TURNS[2:]}, "sft.messages_key", "begins with the assistant"),
        ({"messages": "hello"}, "sft.messages_key", "list of chat messages"),
        ({"messages": [{"role": "user"}]}, "sft.messages_key", "text `role` and a text `content`"),
        ({"text": "hello"}, "sft.messages_key", "neither this column nor"),
        ({"prompt": "a", "output": "b"}, "sft.response_key", "completion or response or answer"),
    ],
)
def test_a_row_nothing_can_be_learned_from_is_refused_with_its_place(tmp_path, row, key, match):
    with pytest.raises(ConfigError, match=match) as refused:
        build(tmp_path, [row])
    assert refused.value.key == key and "rows.jsonl:1" in str(refused.value)


def test_prompt_settings_that_conversations_would_ignore_are_refused(tmp_path):
    for setting in ({"system_prompt": "x"}, {"instruction": "x"}, {"num_examples": 1}):
        with pytest.raises(ConfigError, match="taken as they stand"):
            build(tmp_path, [{"messages": TURNS}], task=setting)


@given(
    st.integers(1, 9).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows))),
    st.integers(1, 4),
    st.integers(0, 50),
)
def test_every_row_is_learned_exactly_once_per_epoch(sizes, num_epochs, seed):
    num_rows, batch = sizes
    rows = [SftRow(f"r{index}", (1, 2), (0, 1), f"t{index}") for index in range(num_rows)]
    loader = PromptLoader(rows, batch, seed)
    counts = dict.fromkeys((row.prompt_id for row in rows), 0)
    planned = num_rows * num_epochs
    for _ in range(-(-planned // batch)):
        found = loader.next_batch(at_most=planned - loader.num_consumed)
        assert len({row.prompt_id for row in found}) == len(found)
        for row in found:
            counts[row.prompt_id] += 1
        loader.mark_consumed(row.prompt_id for row in found)
    assert set(counts.values()) == {num_epochs}
