import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config.errors import ConfigError
from paceline.data.prompts import Example, find_files, read_examples


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(*files: Path, prompt_key: str = "prompt", answer_key: str = "answer") -> list[Example]:
    return read_examples(list(files), prompt_key, answer_key, "row")


def refusal(*files: Path, **keys: str) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        read(*files, **keys)
    assert "\n" not in str(refused.value)
    return refused.value


def test_jsonl_rows_become_examples_with_the_other_columns_as_metadata(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": " Wie viel? ", "answer": "2 €", "level": 3})
    (example,) = read(file)
    assert example == Example("row:0", " Wie viel? ", "2 €", f"{file}:1", {"level": 3})


def test_parquet_rows_read_the_same(tmp_path):
    messages = [{"role": "user", "content": "1+1?"}]
    file = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"prompt": [messages] * 3, "answer": [2, None, 4], "level": ["a", "b", "c"]}), file
    )
    examples = read(file)
    assert [example.question for example in examples] == [({"role": "user", "content": "1+1?"},)] * 3
    assert [example.answer for example in examples] == ["2", None, "4"]
    assert examples[2].metadata == {"level": "c"}
    assert examples[2].where == f"{file} row 2"


def test_ids_count_over_all_files_and_empty_lines_are_no_rows(tmp_path):
    first = tmp_path / "a.jsonl"
    first.write_text('{"prompt": "x"}\n\n{"prompt": "y"}\n  \n')
    second = write_jsonl(tmp_path / "b.jsonl", {"prompt": "z"})
    examples = read(first, second)
    assert [example.example_id for example in examples] == ["row:0", "row:1", "row:2"]
    assert examples[1].where == f"{first}:3"


def test_keys_may_name_a_field_inside_a_column(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", {"q": {"text": "1+1?"}, "reward_model": {"ground_truth": "2"}})
    (example,) = read(file, prompt_key="q.text", answer_key="reward_model.ground_truth")
    assert (example.question, example.answer) == ("1+1?", "2")


def test_a_column_whose_name_has_a_dot_is_found(tmp_path):
    (example,) = read(write_jsonl(tmp_path / "a.jsonl", {"a.b": "x"}), prompt_key="a.b")
    assert example.question == "x"


def test_a_wrong_prompt_key_names_file_line_columns_and_the_nearest(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, {"promt": "y", "answer": "z"})
    error = refusal(file)
    assert (error.key, error.value, error.nearest) == ("task.prompt_key", "prompt", "promt")
    assert f"{file}:2" in str(error)
    assert "promt, answer" in str(error)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "x"', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'["x"]', "must be a JSON object, is a list"),
        (b'{"prompt": " "}', "is empty"),
        (b'{"prompt": null}', "is null"),
        (b'{"prompt": 3}', "must be text or a list of chat messages, is int"),
        (b'{"prompt": []}', "must be text or a list of chat messages"),
        (b'{"prompt": [{"from": "human", "value": "x"}]}', "text `role` and a text `content`"),
        (b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "text `content`"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "the last message",
        ),
        (b'{"prompt": "x", "answer": ["a"]}', "must be text or a number, is list"),
    ],
)
def test_a_malformed_row_is_refused_with_its_file_and_line(tmp_path, line, words):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    error = refusal(file)
    assert words in str(error)
    assert f"{file}:2" in str(error)


def test_an_answer_that_is_a_record_suggests_a_field_of_it(tmp_path):
    error = refusal(write_jsonl(tmp_path / "a.jsonl", {"prompt": "x", "answer": {"value": 1}}))
    assert (error.key, error.nearest) == ("task.answer_key", "answer.value")


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    file = tmp_path / "a.parquet"
    file.write_text("not parquet")
    assert "is not a readable parquet file" in str(refusal(file))


def test_a_folder_is_read_with_its_subfolders_in_order(tmp_path):
    (tmp_path / "data").mkdir()
    files = [write_jsonl(tmp_path / name, {"prompt": "x"}) for name in ("b.jsonl", "data/a.jsonl", "a.jsonl")]
    (tmp_path / "README.md").write_text("no data")
    assert find_files(str(tmp_path), "train", "task.path") == sorted(files)


def test_test_files_of_a_folder_are_not_trained_on(tmp_path):
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl", "validation.jsonl"):
        write_jsonl(tmp_path / name, {"prompt": "x"})
    train = find_files(str(tmp_path), "train", "task.path")
    held_out = find_files(str(tmp_path), "evaluation", "task.eval_path")
    assert [file.name for file in train] == ["train-0.jsonl", "train-1.jsonl"]
    assert [file.name for file in held_out] == ["test-0.jsonl", "validation.jsonl"]


def test_a_path_that_is_missing_empty_or_of_another_kind_is_refused(tmp_path):
    write_jsonl(tmp_path / "prompts.jsonl", {"prompt": "x"})
    with pytest.raises(ConfigError, match=r"does not exist \(nearest: .*prompts\.jsonl\)"):
        find_files(str(tmp_path / "promts.jsonl"), "train", "task.path")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no file ending in"):
        find_files(str(tmp_path / "empty"), "train", "task.path")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match="a file ending in"):
        find_files(str(tmp_path / "a.csv"), "train", "task.path")
