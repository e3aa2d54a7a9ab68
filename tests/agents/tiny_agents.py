"""Tools and programs for tests; every worker loads this."""

import os
import time
from typing import Any

import openai


def echo(text: str) -> str:
    """What it is given."""
    return text


def add(a: int, b: int) -> int:
    """A sum."""
    return a + b


def fail(text: str) -> str:
    """Raises."""
    raise ValueError("planted")


def hang(text: str) -> str:
    """Takes for ever."""
    time.sleep(3600)  # a tool that hangs: only killing it ends it
    return text


def slow(text: str) -> str:
    """Takes a while."""
    time.sleep(0.3)  # the wait that the ledger must show
    return text


def die(text: str) -> str:
    """Ends its process."""
    os._exit(3)


def long_output(text: str) -> str:
    """More than anybody wants."""
    return "w3 " * 500


def two_questions(
    base_url: str, model: str, messages: list[dict[str, str]], answer: Any, metadata: Any
) -> str:
    """Asks, asks again, and answers with the last reply."""
    client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0)
    reply = ""
    for _ in range(2):
        found = client.chat.completions.create(model=model, messages=messages, max_tokens=3)
        reply = found.choices[0].message.content or ""
        messages = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "w9"}]
    return reply


def asks_nothing(**_: Any) -> None:
    """Never talks to the model."""


def fails_half_way(base_url: str, model: str, messages: list[dict[str, str]], **_: Any) -> None:
    """One question, then an error."""
    client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0)
    client.chat.completions.create(model=model, messages=messages, max_tokens=3)
    raise RuntimeError("planted")


def fails_after_some_answers(base_url: str, model: str, messages: list[dict[str, str]], **_: Any) -> str:
    """One question, and an error where the reply's characters add up to a multiple of three."""
    client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0)
    found = client.chat.completions.create(model=model, messages=messages, max_tokens=3)
    reply = found.choices[0].message.content or ""
    if sum(map(ord, reply)) % 3 == 0:
        raise RuntimeError("planted")
    return reply


def wants_another_temperature(base_url: str, model: str, messages: list[dict[str, str]], **_: Any) -> str:
    """Is refused, and says so."""
    client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0)
    client.chat.completions.create(model=model, messages=messages, max_tokens=2)
    try:
        client.chat.completions.create(model=model, messages=messages, max_tokens=2, temperature=0.1)
    except openai.BadRequestError as error:
        return f"refused {error.param}"
    return "not refused"
