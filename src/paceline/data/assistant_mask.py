"""Conversations to tokens with a mask over the assistant's: tokenised once, and cut where generation would begin.

For an assistant turn, `before` is the conversation up to it with the generation prompt, as a rollout would see it, and
`after` the conversation with it. Both must be *token prefixes* of the whole conversation: only then are the masked
tokens exactly those the model would be asked to produce after exactly the context it would see. A template that changes
earlier turns when later ones arrive, or a tokenizer that merges across the boundary, breaks that; such a row is
reported, never masked by guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from paceline.config.errors import ConfigError
from paceline.data.chat import ChatTokenizer
from paceline.data.prompts import Message


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """`loss_mask` is 1 on the assistant's tokens, end token included. `has_end`: every learned turn ends with one."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    text: str
    has_end: bool


class PrefixViolationError(ValueError):
    """The tokens of a turn's context are no prefix of the conversation's tokens."""


class TurnTokenizer:
    """Renders and tokenises conversations with one chat template (None: the tokenizer's own).

    `template_path` is the file the template is from, for messages."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        template: str | None,
        end_token: int | None,
        template_path: str | None = None,
    ) -> None:
        self._template_path = template_path
        self._tokenizer, self._template, self._end_token = tokenizer, template, end_token

    def tokens(
        self, messages: Sequence[Message], where: str, first_learned: int = 0, last_turn_only: bool = False
    ) -> MaskedTokens:
        """The conversation with its assistant turns from message `first_learned` on masked in.

        What a template writes after a turn's end token (a line break, mostly) is never generated, and not learned.

        Raises:
            PrefixViolationError: see the module's docstring.
            ConfigError: the template refuses the messages.
        """
        text = self._render(messages, False, where)
        ids = self._ids(text)
        mask = [0] * len(ids)
        has_end = True
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= max(1, first_learned)]
        for index in turns[-1:] if last_turn_only else turns:
            before = self._ids(self._render(messages[:index], True, where))
            after = self._ids(self._render(messages[: index + 1], False, where))
            for name, prefix in (("context", before), ("text", after)):
                if ids[: len(prefix)] != prefix:
                    raise PrefixViolationError(f"{where}: the {name} of message {index}")
            end = self._end_of_turn(ids, len(before), len(after))
            has_end = has_end and end is not None
            mask[len(before) : end or len(after)] = [1] * ((end or len(after)) - len(before))
        return MaskedTokens(ids, tuple(mask), text, has_end)

    def _end_of_turn(self, ids: Sequence[int], start: int, stop: int) -> int | None:
        """The position after the last end token of a turn, None when it has none."""
        for position in range(stop, start, -1):
            if ids[position - 1] == self._end_token:
                return position
        return None

    def _ids(self, text: str) -> tuple[int, ...]:
        # the template has written the special tokens; the tokenizer must not add a second set
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, where: str) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            rule = f"the chat template refuses the messages of {where} (roles {roles}): {error}"
            raise ConfigError("model.chat_template", self._template_path, rule) from error
