"""What a chat template writes between one answer of the model and its next: tokens that are appended, never re-made.

An earlier answer is not tokenised again: a model may have sampled "hel" and "lo" where the tokenizer would write
"hello", and the next turn must be conditioned on, and trained with, what was sampled.
"""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError

from paceline.data.chat import ChatTokenizer

_ANSWER = "\u241fanswer\u241f"
"""Stands for the model's answer while the template is rendered; no template writes it by itself."""


class TurnError(ValueError):
    """The chat template cannot continue a conversation; the message says why."""


class TurnRenderer:
    """Renders conversations of one tokenizer and template (None: the tokenizer's own)."""

    def __init__(self, tokenizer: ChatTokenizer, template: str | None = None) -> None:
        self._tokenizer, self._template = tokenizer, template

    def opening(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Tokens of a conversation up to where the model answers.

        Raises:
            TurnError: there is no template, or it refuses the messages.
        """
        return self._tokens(self._render(messages))

    def continuation(self, sampled: Sequence[int], messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Tokens that follow the answer `sampled`, through `messages`, up to where the model answers again.

        The end token that the template writes behind an answer is left out where it was sampled.

        Raises:
            TurnError: as for `opening`, or the template does not show the answer as it is.
        """
        question = {"role": "user", "content": "."}
        text = self._render([question, {"role": "assistant", "content": _ANSWER}, *messages])
        before, answer, after = text.partition(_ANSWER)
        if not answer or not before:
            raise TurnError("the chat template does not write an earlier answer as it is")
        tokens = self._tokens(after)
        if sampled and tokens and tokens[0] == sampled[-1]:
            return tokens[1:]
        return tokens

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self._template is None and not self._tokenizer.chat_template:
            raise TurnError("the tokenizer has no chat template")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise TurnError(f"the chat template refuses the messages: {error}") from error
        return text

    def _tokens(self, text: str) -> tuple[int, ...]:
        # the template has written the special tokens; the tokenizer must not add a second set
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
