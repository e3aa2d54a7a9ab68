import ast
from pathlib import Path

import pytest
from tiny_tokenizer import make_tokenizer

import paceline
from paceline.config.errors import ConfigError
from paceline.config.schema import Config
from paceline.data.chat import PromptRenderer
from paceline.data.prompts import Example
from paceline.types import Sample


def make_config(chat_template: str | None = None, **task: object) -> Config:
    return Config.model_validate({"model": {"chat_template": chat_template}, "task": {"name": "x", **task}})


def example(question: object, answer: str | None = "A", name: str = "row:0") -> Example:
    return Example(name, question, answer, f"file {name}", {"level": 1})  # type: ignore[arg-type]


def test_a_text_question_is_one_user_turn_and_opens_the_answer():
    tokenizer = make_tokenizer()
    prompt = PromptRenderer(make_config(), tokenizer).render(example("1+1?"))
    assert prompt.text == "<s>user\n1+1?</s><s>assistant\n"
    assert (prompt.prompt_id, prompt.answer, prompt.metadata) == ("row:0", "A", {"level": 1})
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_system_prompt_examples_and_instruction_stand_in_their_places():
    shown = [example("a?", "1", "row:1"), example("b?", "2", "row:2")]
    renderer = PromptRenderer(
        make_config(system_prompt="S", instruction="Be short."), make_tokenizer(), shown
    )
    assert renderer.render(example("c?")).text == (
        "<s>system\nS</s>"
        "<s>user\na?\nBe short.</s><s>assistant\n1</s>"
        "<s>user\nb?\nBe short.</s><s>assistant\n2</s>"
        "<s>user\nc?\nBe short.</s><s>assistant\n"
    )


def test_chat_messages_keep_their_turns_and_the_last_gets_the_instruction():
    messages = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    )
    prompt = PromptRenderer(make_config(instruction="I"), make_tokenizer()).render(example(messages))
    assert prompt.text == "<s>user\na</s><s>assistant\nb</s><s>user\nc\nI</s><s>assistant\n"


def test_the_tokens_are_those_of_the_text_with_special_tokens_once():
    tokenizer = make_tokenizer()
    prompt = PromptRenderer(make_config(), tokenizer).render(example("hello"))
    assert list(prompt.token_ids) == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 2  # one for each turn of the template
    assert prompt.token_ids.count(tokenizer.convert_tokens_to_ids("hello")) == 1


def test_a_template_file_replaces_the_tokenizers_own(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    for tokenizer in (make_tokenizer(), make_tokenizer(chat_template=None)):
        assert PromptRenderer(make_config(str(path)), tokenizer).render(example("q")).text == "[q]"


def test_a_tokenizer_without_a_template_and_a_missing_file_are_refused():
    with pytest.raises(ConfigError, match=r"task\.use_chat_template.*model\.chat_template"):
        PromptRenderer(make_config(), make_tokenizer(chat_template=None))
    with pytest.raises(ConfigError, match=r"model\.chat_template.*cannot be read"):
        PromptRenderer(make_config("no/such/file"), make_tokenizer())


def test_a_refused_template_is_named_by_its_file(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ raise_exception('no') }}")
    with pytest.raises(
        ConfigError, match=r"model\.chat_template = '.*template\.jinja': the chat template refuses"
    ):
        PromptRenderer(make_config(str(path)), make_tokenizer()).render(example("q"))


def test_a_template_that_refuses_the_messages_is_one_clear_message():
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    renderer = PromptRenderer(make_config(system_prompt="S"), make_tokenizer(template))
    with pytest.raises(
        ConfigError, match=r"refuses the messages of file row:0 \(roles system, user\): no system role"
    ):
        renderer.render(example("q"))


def test_a_system_prompt_and_messages_with_their_own_contradict():
    messages = ({"role": "system", "content": "own"}, {"role": "user", "content": "a"})
    with pytest.raises(ConfigError, match=r"task\.system_prompt.*a system message of their own"):
        PromptRenderer(make_config(system_prompt="S"), make_tokenizer()).render(example(messages))


def test_without_the_chat_template_the_parts_are_plain_text():
    tokenizer = make_tokenizer(chat_template=None)
    config = make_config(use_chat_template=False, system_prompt="S", instruction="I")
    prompt = PromptRenderer(config, tokenizer, [example("a?", "1")]).render(example("b?"))
    assert prompt.text == "S\n\na?\nI\n1\n\nb?\nI"
    with pytest.raises(ConfigError, match="only a chat template can render"):
        PromptRenderer(config, tokenizer).render(example(({"role": "user", "content": "a"},)))


def test_a_worked_example_without_an_answer_is_refused():
    with pytest.raises(ConfigError, match=r"task\.num_examples.*needs an answer"):
        PromptRenderer(make_config(), make_tokenizer(), [example("a?", None)]).render(example("b?"))


def test_sampled_ids_that_would_encode_otherwise_stay_what_was_sampled():
    tokenizer = make_tokenizer()
    sampled = tuple(tokenizer.convert_tokens_to_ids(["hel", "lo"]))
    text = tokenizer.decode(sampled)
    assert text == "hello"
    assert len(tokenizer(text)["input_ids"]) == 1  # encoding the text again would train on another token
    sample = Sample("row:0", 0, sampled, (-0.1, -0.2), (1, 1), "stop", 0, 1, text)
    assert sample.token_ids == sampled


def test_only_prompts_and_demonstrations_are_tokenised():
    """Nobody else calls a tokenizer, so no sampled response can be turned from text into tokens again."""
    encoding_methods = {"apply_chat_template", "batch_encode_plus", "encode_plus", "encode_batch", "tokenize"}
    package = Path(paceline.__file__).parent
    callers = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            name = called.rpartition(".")[2]
            if (
                name.lstrip("_") == "tokenizer"
                or name in encoding_methods
                or called.endswith("tokenizer.encode")
            ):
                callers.add(str(file.relative_to(package)))
    shell_words = {file for file in callers if file.startswith("adapters/")}  # a shell's, not a model's
    demonstrations = {"data/sft.py", "data/assistant_mask.py"}
    # a judge and a reward model read text with tokenizers of their own; nothing they tokenise is trained on
    readers = {"reward_models/conversation.py", "reward_models/judge.py"}
    # what others say in an episode or to a server; answers of the model stay the tokens that were sampled
    others = {"data/turns.py", "agents/episodes.py", "serve/app.py"}
    known = {"demo/weights.py", *shell_words, *demonstrations, *readers, *others}
    assert callers - known == {"data/chat.py"}
