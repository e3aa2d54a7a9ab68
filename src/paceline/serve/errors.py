"""What a request is refused with, in the shape OpenAI's clients read."""

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class ApiError(Exception):
    """One refusal: HTTP status, sentence, the parameter at fault and a code, as OpenAI's API names them."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    kind: str = "invalid_request_error"
    retry_after_s: int | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def too_long(num_prompt: int, num_new: int, max_context: int) -> ApiError:
    """A prompt, or prompt and limit together, beyond the model's context."""
    message = (
        f"This model's maximum context length is {max_context} tokens; the request has {num_prompt} in the prompt and "
        f"asks for {num_new} more."
    )
    return ApiError(400, message, "messages", "context_length_exceeded")


def unsupported(param: str, value: Any, allowed: str) -> ApiError:
    """A parameter of OpenAI's API with a value that this engine does not serve."""
    return ApiError(400, f"{param}={value!r} is not supported; use {allowed}.", param, "unsupported_value")
