"""What a reward's own model reads: the conversation, rendered by its own chat template. Torch-free."""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError

from paceline.config.errors import ConfigError
from paceline.data.chat import ChatTokenizer
from paceline.types import RewardJob

Message = Mapping[str, str]


def messages_of(job: RewardJob) -> list[Message]:
    """The prompt as a conversation; the rendered prompt is one user message where there is none."""
    return list(job.messages) or [{"role": "user", "content": job.prompt}]


def render_conversation(tokenizer: ChatTokenizer, job: RewardJob) -> tuple[int, ...]:
    """Tokens of the prompt's messages and the completion as the assistant's turn.

    The template writes its special tokens itself, so the tokenizer adds none.

    Raises:
        TemplateError: the template refuses these messages.
    """
    messages = [*messages_of(job), {"role": "assistant", "content": job.completion}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_template(tokenizer: ChatTokenizer, job: RewardJob, key: str) -> None:
    """Renders one conversation before anything is sampled. Raises `ConfigError` for `key`."""
    if not tokenizer.chat_template:
        rule = "the model's tokenizer has no chat template, so the conversation cannot be written as it was trained"
        raise ConfigError(key, None, rule, "the path of a Jinja template")
    try:
        rendered = render_conversation(tokenizer, job)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages_of(job))
        rule = f"the template refuses a conversation of this task (roles {roles}, assistant): {error}"
        raise ConfigError(key, "the tokenizer's own or the one given", rule) from error
    if not rendered:
        raise ConfigError(key, "the tokenizer's own or the one given", "renders a conversation to nothing")


def shared_length(conversations: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all conversations begin with, one less than the shortest has at most (and at least one)."""
    first, last = min(conversations), max(conversations)  # all others lie between these two
    length = next(
        (index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        min(len(first), len(last)),
    )
    return max(1, min(length, min(map(len, conversations)) - 1))
