"""Answers as OpenAI's API writes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.serve.generation import Choice, Update

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all objects of one answer share. `spell` gives a token's own text."""

    answer_id: str
    created: int
    model: str
    wants_logprobs: bool
    wants_token_ids: bool
    prompts: tuple[tuple[int, ...], ...]
    spell: Callable[[int], str]

    def envelope(self, kind: str) -> Json:
        """Fields around the choices."""
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def usage(self, choices: Sequence[Choice]) -> Json:
        """Tokens read and sampled."""
        num_prompt = sum(map(len, self.prompts))
        num_new = sum(len(choice.token_ids) for choice in choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }

    def prompt_tokens(self) -> Json:
        """Token ids of the prompt, of all prompts where there are several, if asked for."""
        if not self.wants_token_ids:
            return {}
        ids = [list(prompt) for prompt in self.prompts]
        return {"prompt_token_ids": ids[0] if len(ids) == 1 else ids}


def chat_answer(head: AnswerHead, choices: Sequence[Choice]) -> Json:
    """A `chat.completion`."""
    rows = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "finish_reason": choice.finish_reason,
            "logprobs": _chat_logprobs(head, choice.token_ids, choice.logprobs),
            **_token_ids(head, choice.token_ids),
        }
        for choice in choices
    ]
    return {
        **head.envelope("chat.completion"),
        "choices": rows,
        "usage": head.usage(choices),
        **head.prompt_tokens(),
    }


def chat_opening(head: AnswerHead, choices: Sequence[Choice]) -> list[Json]:
    """The first chunk of every choice: its role, and the prompt's tokens if asked for."""
    return [
        {
            **head.envelope("chat.completion.chunk"),
            "choices": [
                {
                    "index": choice.index,
                    "delta": {"role": "assistant", "content": ""},
                    "finish_reason": None,
                    "logprobs": None,
                }
            ],
            **head.prompt_tokens(),
        }
        for choice in choices
    ]


def chat_chunk(head: AnswerHead, update: Update) -> Json:
    """A `chat.completion.chunk` with what is new."""
    row = {
        "index": update.choice.index,
        "delta": {"content": update.text},
        "finish_reason": update.choice.finish_reason,
        "logprobs": _chat_logprobs(head, update.token_ids, update.logprobs),
        **_token_ids(head, update.token_ids),
    }
    return {**head.envelope("chat.completion.chunk"), "choices": [row]}


def text_answer(head: AnswerHead, choices: Sequence[Choice]) -> Json:
    """A `text_completion`."""
    rows = [_text_row(head, c, c.text, c.token_ids, c.logprobs, first_offset=0) for c in choices]
    return {
        **head.envelope("text_completion"),
        "choices": rows,
        "usage": head.usage(choices),
        **head.prompt_tokens(),
    }


def text_chunk(head: AnswerHead, update: Update) -> Json:
    """A `text_completion` with what is new."""
    offset = len(update.choice.text) - len(update.text)
    row = _text_row(head, update.choice, update.text, update.token_ids, update.logprobs, offset)
    return {**head.envelope("text_completion"), "choices": [row]}


def usage_chunk(head: AnswerHead, kind: str, choices: Sequence[Choice]) -> Json:
    """The last chunk where `stream_options.include_usage` asks for it."""
    return {**head.envelope(kind), "choices": [], "usage": head.usage(choices)}


def _text_row(
    head: AnswerHead,
    choice: Choice,
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    first_offset: int,
) -> Json:
    found = None
    if head.wants_logprobs:
        tokens = [head.spell(token) for token in token_ids]
        offsets = [first_offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
        found = {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }
    return {
        "index": choice.index,
        "text": text,
        "finish_reason": choice.finish_reason,
        "logprobs": found,
        **_token_ids(head, token_ids),
    }


def _chat_logprobs(head: AnswerHead, token_ids: Sequence[int], logprobs: Sequence[float]) -> Json | None:
    if not head.wants_logprobs:
        return None
    rows = []
    for token, logprob in zip(token_ids, logprobs, strict=True):
        text = head.spell(token)
        rows.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": rows, "refusal": None}


def _token_ids(head: AnswerHead, token_ids: Sequence[int]) -> Json:
    return {"token_ids": list(token_ids)} if head.wants_token_ids else {}
