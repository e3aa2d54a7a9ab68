import json
from pathlib import Path

import pytest
from tiny_tokenizer import make_tokenizer

from paceline.config.errors import ConfigError
from paceline.config.schema import Config
from paceline.data.loader import PromptLoader
from paceline.data.tasks import Task, build_task, max_new_tokens_for
from paceline.types import Prompt

BATCH = Config().batch.num_prompts
REVERSAL = {"name": "word_sequence_reversal", "params": {"min_words": 2, "max_words": 3}}


def make_config(
    seed: int = 0, max_new_tokens: int = 16, max_context: int | None = None, **task: object
) -> Config:
    return Config.model_validate(
        {
            "run": {"seed": seed},
            "model": {"max_context": max_context},
            "rollout": {"max_new_tokens": max_new_tokens},
            "task": task,
        }
    )


def gym_task(seed: int = 0, **task: object) -> Task:
    sizes = {"size": 40, "eval_size": 10}
    return build_task(make_config(seed, **{**REVERSAL, **sizes, **task}), make_tokenizer())


def write_rows(path: Path, count: int, first: int = 0) -> str:
    rows = [{"prompt": f"question {n}", "answer": str(n)} for n in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def file_task(path: str, max_context: int | None = None, max_new_tokens: int = 16, **task: object) -> Task:
    config = make_config(0, max_new_tokens, max_context, path=path, **task)
    return build_task(config, make_tokenizer())


def questions(prompts: tuple[Prompt, ...]) -> set[str]:
    return {prompt.text for prompt in prompts}


def test_a_reasoning_gym_task_has_its_sizes_answers_and_entries():
    task = gym_task(num_examples=2)
    assert (len(task.train), len(task.evaluation), task.num_examples) == (40, 10, 2)
    assert task.reward.name == "reasoning_gym"
    assert task.reward.params == {
        "dataset": "word_sequence_reversal",
        "params": {"min_words": 2, "max_words": 3},
    }
    prompt = task.train[0]
    assert prompt.metadata["entry"]["answer"] == prompt.answer
    assert prompt.text.count("<s>assistant") == 3
    assert {p.prompt_id for p in task.train} == {f"train:{n}" for n in range(40)}


def test_no_question_is_trained_measured_and_shown_at_once_even_when_they_are_few():
    task = build_task(
        make_config(
            name="count_bits", params={"min_n": 1, "max_n": 40}, size=1000, eval_size=10, num_examples=4
        ),
        make_tokenizer(),
    )
    trained, held_out = questions(task.train), questions(task.evaluation)
    assert len(held_out) == len(task.evaluation) == 10
    assert len(trained) == len(task.train) == 26  # 40 numbers, 10 held out, 4 shown
    assert not trained & held_out
    assert task.num_duplicates > 0
    assert any("fewer than task.size = 1000" in note for note in task.notes)


def test_held_out_questions_and_examples_are_the_same_for_every_seed_and_training_ones_are_not():
    first, again, other = (
        gym_task(1, num_examples=2),
        gym_task(1, num_examples=2),
        gym_task(2, num_examples=2),
    )
    assert first == again
    assert first.evaluation == other.evaluation
    assert questions(first.train) != questions(other.train)


def test_a_task_too_small_for_its_held_out_questions_is_refused():
    with pytest.raises(ConfigError) as refused:
        gym_task(name="count_bits", params={"min_n": 1, "max_n": 5}, eval_size=64)
    assert (refused.value.key, refused.value.nearest) == ("task.eval_size", "4")
    assert "only about 5 different questions" in str(refused.value)
    with pytest.raises(ConfigError, match="none is left"):
        gym_task(name="count_bits", params={"min_n": 1, "max_n": 5}, eval_size=5)
    task = gym_task(name="count_bits", params={"min_n": 1, "max_n": 5}, eval_size=4)
    assert (len(task.train), len(task.evaluation)) == (1, 4)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            {"name": "word_sortng"},
            "task.name = 'word_sortng': is no reasoning-gym task (nearest: word_sorting",
        ),
        ({"params": {"min_word": 2}}, "task.params.min_word = 2: is no parameter"),
        ({"params": {"min_words": 5, "max_words": 2}}, "max_words must be >= min_words"),
        ({"params": {"seed": 1}}, "task.params.seed = 1: is set for you (nearest: run.seed)"),
        ({"params": {"size": 1}}, "(nearest: task.size)"),
        (
            {"name": "word_sorting", "params": {"transformation": "lower"}},
            "must be one of lowercase, uppercase, original, randomcase (nearest: lowercase)",
        ),
    ],
)
def test_a_wrong_task_or_parameter_is_refused_with_the_nearest(task, words):
    with pytest.raises(ConfigError) as refused:
        gym_task(**task)
    assert words in str(refused.value)


def test_names_of_a_choice_are_taken_as_text():
    task = gym_task(
        name="word_sorting", params={"transformation": "lowercase", "min_words": 2, "max_words": 2}
    )
    assert all(prompt.answer == prompt.answer.lower() for prompt in task.train if prompt.answer)


def test_held_out_rows_are_split_off_the_same_way_whatever_the_seed_and_the_order(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", 50)
    task = file_task(path, eval_size=10, num_examples=3)
    assert (len(task.train), len(task.evaluation), task.num_examples) == (37, 10, 3)
    assert not questions(task.train) & questions(task.evaluation)
    assert build_task(make_config(9, path=path, eval_size=10, num_examples=3), make_tokenizer()) == task
    turned = tmp_path / "b.jsonl"
    turned.write_text("".join(reversed(Path(path).read_text().splitlines(keepends=True))))
    assert questions(file_task(str(turned), eval_size=10, num_examples=3).evaluation) == questions(
        task.evaluation
    )


def test_a_question_held_out_is_not_trained_on_through_a_second_row_with_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "same", "answer": "1"}\n' * 20 + '{"prompt": "other", "answer": "2"}\n')
    task = file_task(str(path), eval_size=1)
    assert len(task.train) + len(task.evaluation) + task.num_duplicates == 21
    assert not questions(task.train) & questions(task.evaluation)


def test_each_row_of_a_given_held_out_file_is_scored_once(tmp_path):
    task = file_task(
        write_rows(tmp_path / "train.jsonl", 20),
        eval_path=write_rows(tmp_path / "test.jsonl", 100, 1000),
        eval_size=64,
    )
    assert [prompt.prompt_id for prompt in task.evaluation] == [f"eval:{n}" for n in range(100)]
    assert len(questions(task.evaluation)) == 100
    assert any("each of its 100 rows is scored" in note for note in task.notes)


def test_training_rows_that_the_held_out_file_also_has_are_left_out_and_counted(tmp_path):
    task = file_task(
        write_rows(tmp_path / "train.jsonl", 20),
        eval_path=write_rows(tmp_path / "test.jsonl", 10, 15),
        eval_size=1,
    )
    assert (len(task.train), len(task.evaluation), task.num_duplicates) == (15, 10, 5)


def test_eighteen_rows_are_trained_on_and_a_batch_of_thirty_two_is_refused(tmp_path):
    task = file_task(write_rows(tmp_path / "a.jsonl", 18), eval_size=0)
    assert len(task.train) == 18
    assert task.evaluation == ()
    with pytest.raises(ConfigError, match=r"batch\.num_prompts = 32.*nearest: 18"):
        PromptLoader(task.train, 32, seed=0)


def test_nothing_to_train_on_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no rows"):
        file_task(write_rows(tmp_path / "a.jsonl", 0))
    with pytest.raises(ConfigError, match="none is left to train on") as refused:
        file_task(write_rows(tmp_path / "b.jsonl", 18), eval_size=64)
    assert (refused.value.key, refused.value.nearest) == ("task.eval_size", "2")
    with pytest.raises(ConfigError, match=r"task\.eval_path.*holds no rows"):
        file_task(str(tmp_path / "b.jsonl"), eval_path=str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("asked", "key", "nearest"),
    [
        ({"eval_size": 64}, "eval_size", 40 - BATCH),
        ({"eval_size": 64, "num_examples": 3}, "eval_size", 40 - BATCH - 3),
        ({"eval_size": 64, "num_examples": 30}, "eval_size", 40 - 1 - 30),  # a batch there cannot be
        ({"eval_size": 38, "num_examples": 3}, "eval_size", 40 - BATCH - 3),
        ({"eval_size": 0, "num_examples": 41}, "num_examples", 40 - BATCH),
        ({"eval_size": 6, "num_examples": 45}, "num_examples", 40 - BATCH - 6),
    ],
)
def test_the_nearest_size_of_what_is_set_aside_is_the_largest_that_leaves_a_batch_or_else_one(
    tmp_path, asked, key, nearest
):
    path = write_rows(tmp_path / "a.jsonl", 40)
    with pytest.raises(ConfigError, match="none is left to train on") as refused:
        file_task(path, **asked)
    assert (refused.value.key, refused.value.nearest) == (f"task.{key}", str(nearest))
    task = file_task(path, **{**asked, key: nearest})
    assert len(task.train) == 40 - len(task.evaluation) - task.num_examples


def test_the_nearest_size_counts_rows_with_the_same_question_as_one(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"question {n % 12}", "answer": str(n)} for n in range(48)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="has only 12 different questions: with 12 held out") as refused:
        file_task(str(path), eval_size=12)
    assert refused.value.nearest == "8"  # four questions of four rows each make a batch
    assert len(file_task(str(path), eval_size=8).train) == BATCH


def test_a_held_out_file_that_has_every_question_is_what_is_refused(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", 10)
    with pytest.raises(ConfigError, match="none is left to train on") as refused:
        file_task(path, eval_path=path, num_examples=2)
    assert (refused.value.key, refused.value.nearest) == ("task.eval_path", None)
    half = write_rows(tmp_path / "b.jsonl", 6)
    with pytest.raises(
        ConfigError, match=r"4 different questions beside those of task\.eval_path"
    ) as refused:
        file_task(path, eval_path=half, num_examples=4)
    assert (refused.value.key, refused.value.nearest) == ("task.num_examples", "3")


def test_an_answer_column_that_the_reward_needs_must_be_there(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "answers": "1"}\n')
    with pytest.raises(ConfigError) as refused:
        file_task(str(path), eval_size=0)
    assert (refused.value.key, refused.value.nearest) == ("task.answer_key", "answers")
    assert f"{path}:1" in str(refused.value)
    assert file_task(str(path), eval_size=0, reward="my_module:score").train[0].answer is None


def test_a_reasoning_gym_reward_needs_a_reasoning_gym_task(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", 3)
    with pytest.raises(ConfigError, match=r"task\.reward.*task\.name"):
        file_task(path, eval_size=0, reward="reasoning_gym_strict")


def test_a_prompt_of_2089_tokens_leaves_2007_of_a_context_of_4096():
    prompt = Prompt("p", tuple(range(2089)), "text")
    assert max_new_tokens_for(prompt, 2048, 4096) == 2007
    assert max_new_tokens_for(prompt, 2000, 4096) == 2000
    assert max_new_tokens_for(prompt, 2048, None) == 2048
    assert max_new_tokens_for(prompt, 2048, 2089) == 0


def lengths_task(tmp_path: Path, max_context: int, **task: object) -> Task:
    """Prompts of 18 tokens plus 1, 10 and 100 bytes of question."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * n, "answer": "1"}) + "\n" for n in (1, 10, 100)))
    return file_task(str(path), max_context, max_new_tokens=50, eval_size=0, **task)


def test_a_prompt_that_leaves_one_token_is_kept_with_a_smaller_limit(tmp_path):
    lengths = [len(prompt.token_ids) for prompt in lengths_task(tmp_path, 1000).train]
    task = lengths_task(tmp_path, max_context=lengths[2] + 1)
    assert [max_new_tokens_for(prompt, 50, lengths[2] + 1) for prompt in task.train] == [50, 50, 1]
    assert (task.num_dropped_overlong, task.num_limited, task.longest_prompt) == (0, 1, lengths[2])
    assert any("1 prompts leave less than" in note for note in task.notes)


def test_a_prompt_that_leaves_no_room_is_refused_or_dropped_and_counted(tmp_path):
    longest = lengths_task(tmp_path, 1000).longest_prompt
    with pytest.raises(ConfigError) as refused:
        lengths_task(tmp_path, longest)
    assert (refused.value.key, refused.value.nearest) == ("task.overlong_prompts", "drop")
    assert f"1 of 3 prompts leave no room for a response in the context of {longest} tokens" in str(
        refused.value
    )
    task = lengths_task(tmp_path, longest, overlong_prompts="drop")
    assert (len(task.train), task.num_dropped_overlong) == (2, 1)
    with pytest.raises(ConfigError, match="leaves no training prompt"):
        lengths_task(tmp_path, 3, overlong_prompts="drop")


def test_the_models_stated_context_counts_where_the_recipe_gives_none(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", 3)
    config = make_config(path=path, eval_size=0)
    with pytest.raises(ConfigError, match="context of 4 tokens"):
        build_task(config, make_tokenizer(), max_context=4)


def test_a_task_that_refuses_an_empty_data_set_needs_no_examples_or_evaluation():
    task = gym_task(name="products", params={"min_digits": 2, "max_digits": 2}, num_examples=0, eval_size=0)
    assert len(task.train) == 40 and task.evaluation == ()


def test_shown_messages_stand_before_every_question():
    shown = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    config = make_config(**{**REVERSAL, "size": 4, "eval_size": 2, "system_prompt": "be brief"})
    agent = {"tools": ["paceline.agents.calculator:calculator"], "examples": shown}
    config = Config.model_validate({**config.model_dump(exclude_unset=True), "agent": agent})
    prompt = build_task(config, make_tokenizer()).train[0]
    assert [message["role"] for message in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.text.startswith("<s>system\nbe brief</s><s>user\nq</s><s>assistant\na</s><s>user\n")
