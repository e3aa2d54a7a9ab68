"""Questions to prompts: text and tokens from one rendering.

A prompt is rendered and tokenised exactly once, here. Responses are never tokenised: a model may have sampled
"hel" and "lo" where the tokenizer would have written "hello", and the tokens to train on are those it sampled.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from paceline.config.chat_template import read_chat_template
from paceline.config.errors import ConfigError
from paceline.config.schema import Config
from paceline.data.prompts import Example, Message
from paceline.types import Prompt


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any
    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Renders messages; text when called with `tokenize=False`."""
        ...

    def __call__(self, text: Any, **options: Any) -> Any:
        """Tokenises; the ids are under "input_ids"."""
        ...


class PromptRenderer:
    """Renders questions of one task: system prompt, worked examples as earlier turns, question and instruction.

    Without the chat template the parts are joined by empty lines, each example as its question, a line break and its
    answer. `template` is the recipe's chat template, None for the tokenizer's own. Raises `ConfigError` when a template
    is missing, unreadable, or refuses the messages.
    """

    def __init__(self, config: Config, tokenizer: ChatTokenizer, examples: Sequence[Example] = ()) -> None:
        self._task = config.task
        self._tokenizer = tokenizer
        self._template_path = config.model.chat_template
        self.template = None if self._template_path is None else read_chat_template(self._template_path)
        if self._task.use_chat_template and self.template is None and not tokenizer.chat_template:
            rule = "the tokenizer has no chat template: name one in model.chat_template, or tokenise prompts as text"
            raise ConfigError("task.use_chat_template", True, rule, "false")
        self._examples = tuple(examples)
        self._shown = config.agent.examples

    def render(self, example: Example) -> Prompt:
        """The prompt of one question. The tokens are those of `text`, special tokens of the template included."""
        if self._task.use_chat_template:
            text = self._render_chat(example)
            # The template has written the special tokens; the tokenizer must not add a second set.
            encoded = self._tokenizer(text, add_special_tokens=False)
        else:
            text = self._render_plain(example)
            encoded = self._tokenizer(text)
        token_ids = tuple(encoded["input_ids"])
        if not token_ids:
            raise ConfigError("task.prompt_key", text, f"the prompt from {example.where} has no tokens")
        messages = tuple(self.messages(example))
        return Prompt(example.example_id, token_ids, text, example.answer, example.metadata, messages)

    def messages(self, example: Example) -> list[Message]:
        """The chat up to and including the question: system prompt, worked examples, question with instruction."""
        messages: list[Message] = []
        if self._task.system_prompt is not None:
            messages.append({"role": "system", "content": self._task.system_prompt})
        messages += [dict(message) for message in self._shown]
        for shown in self._examples:
            messages += self._turns(shown)
            messages.append({"role": "assistant", "content": _answer_of(shown)})
        return [*messages, *self._turns(example)]

    def _render_chat(self, example: Example) -> str:
        messages = self.messages(example)
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            rule = f"the chat template refuses the messages of {example.where} (roles {roles}): {error}"
            raise ConfigError("model.chat_template", self._template_path, rule) from error

    def _turns(self, example: Example) -> list[Message]:
        if isinstance(example.question, str):
            return [{"role": "user", "content": self._with_instruction(example.question)}]
        if self._task.system_prompt is not None and example.question[0]["role"] == "system":
            rule = f"the messages of {example.where} bring a system message of their own; keep one of them"
            raise ConfigError("task.system_prompt", self._task.system_prompt, rule, "null")
        *earlier, last = example.question
        return [*earlier, {"role": last["role"], "content": self._with_instruction(last["content"])}]

    def _render_plain(self, example: Example) -> str:
        parts = [] if self._task.system_prompt is None else [self._task.system_prompt]
        parts += [f"{self._plain_question(shown)}\n{_answer_of(shown)}" for shown in self._examples]
        return "\n\n".join([*parts, self._plain_question(example)])

    def _plain_question(self, example: Example) -> str:
        if isinstance(example.question, str):
            return self._with_instruction(example.question)
        rule = f"{example.where} is a list of chat messages, which only a chat template can render"
        raise ConfigError("task.use_chat_template", False, rule, "true")

    def _with_instruction(self, question: str) -> str:
        return question if self._task.instruction is None else f"{question}\n{self._task.instruction}"


def _answer_of(example: Example) -> str:
    if example.answer is None:
        raise ConfigError("task.num_examples", example.where, "a worked example needs an answer", "0")
    return example.answer
