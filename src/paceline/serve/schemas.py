"""Requests of OpenAI's chat and completions API, checked field by field.

A field that is not listed is refused; a listed field with a value that this engine does not serve is refused too and
says what to use. Nothing is ignored but `user`, `metadata` and `store`, which change no answer.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.serve.errors import ApiError, unsupported

MAX_CHOICES = 128


class TextPart(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None

    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates take them."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What chat and completions have in common. `temperature` 0 is greedy; log-probs are those of the distribution
    that was sampled from, temperature included."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool = False
    """Not OpenAI's: go on after end tokens, up to the limit."""
    return_token_ids: bool = False
    """Not OpenAI's: prompt_token_ids in the answer and token_ids in every choice, exactly as they were sampled."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a choice."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(found)

    @property
    def num_choices(self) -> int:
        """`n`, or its default."""
        return self.n or 1

    def refuse_unsupported(self) -> None:
        """Raises `ApiError` for values that would have to be ignored."""
        if self.top_p not in (None, 1.0):
            raise unsupported("top_p", self.top_p, "1, the distribution that log-probs are reported of")
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(self, name):  # two fields of this model by name
                raise unsupported(name, getattr(self, name), "0")
        if self.logit_bias:
            raise unsupported("logit_bias", self.logit_bias, "none")
        if any(not text for text in self.stop_strings):
            raise ApiError(400, "stop must hold no empty text.", "stop", "invalid_value")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true.", "stream_options", "invalid_value")


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        """See `GenerationRequest`."""
        super().refuse_unsupported()
        if self.top_logprobs:
            raise unsupported("top_logprobs", self.top_logprobs, "0: only sampled tokens have log-probs")
        if self.response_format not in (None, {"type": "text"}):
            raise unsupported("response_format", self.response_format, "text")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens differ.", "max_tokens", "invalid_value")

    @property
    def wants_logprobs(self) -> bool:
        """Whether choices carry log-probs."""
        return bool(self.logprobs)

    @property
    def limit(self) -> int | None:
        """New tokens asked for."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt` is a text or token ids, one or a list of them."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def refuse_unsupported(self) -> None:
        """See `GenerationRequest`."""
        super().refuse_unsupported()
        if self.echo:
            raise unsupported("echo", True, "false")
        if self.best_of not in (None, self.num_choices):
            raise unsupported("best_of", self.best_of, "n")
        if self.suffix:
            raise unsupported("suffix", self.suffix, "none")
        if (self.logprobs or 0) > 1:
            raise unsupported("logprobs", self.logprobs, "0 or 1: only sampled tokens have log-probs")

    @property
    def wants_logprobs(self) -> bool:
        """Whether choices carry log-probs."""
        return self.logprobs is not None

    @property
    def limit(self) -> int | None:
        """New tokens asked for; OpenAI's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


R = TypeVar("R", bound=GenerationRequest)


def parse_chat(body: Any) -> ChatRequest:
    """A checked chat request. Raises `ApiError`."""
    return _checked(ChatRequest, body)


def parse_completion(body: Any) -> CompletionRequest:
    """A checked completions request. Raises `ApiError`."""
    return _checked(CompletionRequest, body)


def _checked(kind: type[R], body: Any) -> R:
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from error
    request.refuse_unsupported()
    return request


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    where = [str(part) for part in first["loc"]]
    param = ".".join(where) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if param is None:
        return ApiError(400, "The body must be a JSON object.", None, "invalid_value")
    return ApiError(400, f"Invalid value for '{param}': {first['msg']}.", param, "invalid_value")
