"""The routes: chat, completions, models, sessions, health and metrics."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from paceline.data.seeds import child_seed
from paceline.data.turns import TurnError, TurnRenderer
from paceline.rollout import SamplingParams
from paceline.serve import responses
from paceline.serve.engine_loop import EngineLoop
from paceline.serve.errors import ApiError, too_long, unsupported
from paceline.serve.generation import Choice, Generation, Update, Work
from paceline.serve.guard import Guard, ServeLimits
from paceline.serve.metrics_text import ServeCounters, metrics_text
from paceline.serve.responses import AnswerHead, Json
from paceline.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from paceline.serve.sessions import Session, SessionStore
from paceline.types import Prompt

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served: its name, tokenizer, end tokens, longest context in tokens, temperature where a request names
    none (training's own, for episodes that are trained on)."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: frozenset[int]
    max_context: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request ready to run. `messages` are the conversation it came as, empty where it came as text or tokens."""

    request: GenerationRequest
    prompts: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    session: Session | None
    messages: Sequence[Mapping[str, str]]


class ServeApp:
    """An ASGI application over one engine loop."""

    def __init__(
        self,
        loop: EngineLoop,
        model: ServedModel,
        limits: ServeLimits,
        api_key: str | None = None,
        sessions: SessionStore | None = None,
    ) -> None:
        self._loop, self._model, self._limits = loop, model, limits
        self._guard = Guard(api_key, limits)
        self._renderer = TurnRenderer(model.tokenizer)
        self.sessions = sessions or SessionStore(self._renderer, limits.max_sessions)
        self.counters = ServeCounters()
        self._created = int(time.time())
        self.asgi = Starlette(routes=self._routes(), exception_handlers={HTTPException: _http_error})

    def _routes(self) -> list[Route]:
        guarded = self._guarded
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", guarded(self._metrics), methods=["GET"]),
            Route("/sessions/{session}", guarded(self._session), methods=["GET", "DELETE"]),
        ]
        for prefix in ("/v1", "/sessions/{session}/v1"):
            routes += [
                Route(f"{prefix}/models", guarded(self._models), methods=["GET"]),
                Route(f"{prefix}/models/{{model:path}}", guarded(self._one_model), methods=["GET"]),
                Route(f"{prefix}/chat/completions", guarded(self._chat), methods=["POST"]),
                Route(f"{prefix}/completions", guarded(self._completions), methods=["POST"]),
            ]
        return routes

    def _guarded(self, handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            try:
                self._guard.admit(request)
                response = await handler(request)
            except ApiError as error:
                response = _refused(error)
            except Exception as error:  # of the engine: this client is told, and the server goes on
                message = f"The engine failed: {type(error).__name__}: {error}"
                response = _refused(ApiError(500, message, None, "engine_error", "server_error"))
            self.counters.count(response.status_code)
            return response

        return answer

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "weight_version": self._loop.weight_version})

    async def _metrics(self, request: Request) -> Response:
        text = metrics_text(self._loop, self.counters, len(self.sessions), self.sessions.num_forgotten)
        return PlainTextResponse(
            text, media_type="application/openmetrics-text; version=1.0.0; charset=utf-8"
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_row()]})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model_row())

    def _model_row(self) -> Json:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
            "max_model_len": self._model.max_context,
        }

    async def _session(self, request: Request) -> Response:
        session_id = request.path_params["session"]
        taken = request.method == "DELETE"
        session = self.sessions.close(session_id) if taken else self.sessions.find(session_id)
        if session is None:
            raise ApiError(404, f"There is no session {session_id!r}.", None, "session_not_found")
        rows = [
            {
                "prompt_token_ids": list(prompt),
                "token_ids": list(sample.token_ids),
                "logprobs": list(sample.logprobs),
                "loss_mask": list(sample.loss_mask),
                "finish_reason": sample.finish_reason,
                "weight_version": sample.weight_version,
                "token_versions": list(sample.token_versions),
                "text": sample.text,
            }
            for prompt, sample in session.samples()
        ]
        return JSONResponse({"id": session_id, "num_turns": session.num_turns, "samples": rows})

    async def _chat(self, request: Request) -> Response:
        chat = parse_chat(await self._guard.json_body(request))
        self._check_model(chat.model)
        session = self._session_of(request, chat)
        messages = [message.plain() for message in chat.messages]
        try:
            prompt = session.prompt_ids(messages) if session else self._renderer.opening(messages)
        except TurnError as error:
            raise ApiError(400, f"{error}.", "messages", "invalid_value") from error
        asked = Asked(chat, (prompt,), self._new_tokens(chat, [prompt], session), session, messages)
        return await self._answer(request, asked)

    async def _completions(self, request: Request) -> Response:
        completion = parse_completion(await self._guard.json_body(request))
        self._check_model(completion.model)
        session = self._session_of(request, completion)
        prompts = tuple(self._prompt_tokens(prompt) for prompt in completion.prompts)
        if not prompts or (session and len(prompts) > 1):
            raise ApiError(
                400, "There must be a prompt, and one per turn of a session.", "prompt", "invalid_value"
            )
        asked = Asked(completion, prompts, self._new_tokens(completion, prompts, session), session, ())
        return await self._answer(request, asked)

    def _session_of(self, request: Request, asked: GenerationRequest) -> Session | None:
        named = request.path_params.get("session") or request.headers.get("x-session-id")
        if named is None:
            return None
        if asked.num_choices > 1:
            raise ApiError(400, "A session's turn has one choice.", "n", "invalid_value")
        session = self.sessions.open(named)
        if session.temperature is not None and asked.temperature not in (None, session.temperature):
            raise unsupported(
                "temperature", asked.temperature, f"{session.temperature:g}, which is trained with"
            )
        return session

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            message = f"The model `{name}` does not exist; this server has `{self._model.name}`."
            raise ApiError(404, message, "model", "model_not_found")

    def _prompt_tokens(self, prompt: str | list[int]) -> tuple[int, ...]:
        ids = tuple(self._model.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else tuple(prompt)
        if not ids:
            raise ApiError(400, "A prompt must have a token.", "prompt", "invalid_value")
        if not all(0 <= token < len(self._model.tokenizer) for token in ids):
            raise ApiError(400, "A prompt's token id is not in the vocabulary.", "prompt", "invalid_value")
        return ids

    def _new_tokens(
        self,
        request: ChatRequest | CompletionRequest,
        prompts: Sequence[tuple[int, ...]],
        session: Session | None,
    ) -> tuple[int, ...]:
        """New tokens of every prompt's choices: what was asked for, or what there is room for."""
        most, asked = self._limits.max_new_tokens, request.limit
        if asked is not None and asked > most:
            message = f"max_tokens is {asked}, and this server gives at most {most}."
            raise ApiError(400, message, "max_tokens", "invalid_value")
        found = []
        for prompt in prompts:
            bound = session.max_total_tokens if session else None
            if bound is not None:  # an answer of a bounded session is as long as there is room for
                asked = min(asked or most, max(1, bound - len(prompt)))
            room = min(self._model.max_context, bound or self._model.max_context) - len(prompt)
            if room < (asked or 1):
                raise too_long(len(prompt), asked or 1, self._model.max_context)
            found.append(asked or min(most, room))
        return tuple(found)

    async def _answer(self, request: Request, asked: Asked) -> Response:
        num_choices = asked.request.num_choices * len(asked.prompts)
        if self.counters.in_flight + num_choices > self._limits.max_in_flight:
            message = f"{self.counters.in_flight} choices are in progress; try again."
            raise ApiError(503, message, None, "overloaded", "server_error", 1)
        head = self._head(asked)
        generation = self._generation(asked)
        if asked.request.stream:
            events = self._events(asked, head, generation)
            return StreamingResponse(events, media_type="text/event-stream")
        with self.counters.holding(num_choices), generation:
            choices = await _unless_gone(request, generation.finished())
        self._record(asked, choices)
        write = responses.chat_answer if isinstance(asked.request, ChatRequest) else responses.text_answer
        return JSONResponse(write(head, choices))

    async def _events(self, asked: Asked, head: AnswerHead, generation: Generation) -> AsyncIterator[str]:
        """Server-sent events. Closed by the server when the client is gone, which ends the generation."""
        is_chat = isinstance(asked.request, ChatRequest)
        chunk = responses.chat_chunk if is_chat else responses.text_chunk
        with self.counters.holding(len(generation.choices)), generation:
            try:
                for opening in responses.chat_opening(head, generation.choices) if is_chat else ():
                    yield _event(opening)
                async for update in generation.updates():
                    if _is_shown(asked.request, update):
                        yield _event(chunk(head, update))
            except Exception as error:  # of the engine: the status line is gone, so the stream says it
                message = f"The engine failed: {type(error).__name__}: {error}"
                yield _event(ApiError(500, message, None, "engine_error", "server_error").body())
                return
        self._record(asked, generation.choices)
        if asked.request.stream_options and asked.request.stream_options.include_usage:
            kind = "chat.completion.chunk" if is_chat else "text_completion"
            yield _event(responses.usage_chunk(head, kind, generation.choices))
        yield "data: [DONE]\n\n"

    def _head(self, asked: Asked) -> AnswerHead:
        prefix = "chatcmpl" if isinstance(asked.request, ChatRequest) else "cmpl"
        assert isinstance(asked.request, ChatRequest | CompletionRequest)
        return AnswerHead(
            f"{prefix}-{secrets.token_hex(12)}",
            int(time.time()),
            self._model.name,
            asked.request.wants_logprobs,
            asked.request.return_token_ids,
            asked.prompts,
            lambda token: str(self._model.tokenizer.decode([token], skip_special_tokens=False)),
        )

    def _generation(self, asked: Asked) -> Generation:
        request = asked.request
        default = self._model.temperature
        if asked.session is not None and asked.session.temperature is not None:
            default = asked.session.temperature
        temperature = default if request.temperature is None else request.temperature
        params = SamplingParams(temperature, self._model.stop_token_ids, request.ignore_eos)
        works, first = [], 0
        for number, (prompt, limit) in enumerate(zip(asked.prompts, asked.limits, strict=True)):
            seeds = tuple(_seed(asked, number, choice) for choice in range(request.num_choices))
            works.append(Work(Prompt(f"http:{number}", prompt, ""), seeds, limit, first))
            first += len(seeds)
        return Generation(self._loop, self._model.tokenizer, params, request.stop_strings, works)

    def _record(self, asked: Asked, choices: Sequence[Choice]) -> None:
        if asked.session is not None:
            asked.session.record(asked.prompts[0], choices[0].turn(), asked.messages)


def _seed(asked: Asked, number: int, choice: int) -> int:
    """Seeds of a request with a seed, or of a session that has one, can be had again; others are drawn."""
    if asked.request.seed is not None:
        return child_seed(asked.request.seed, "serve", number, choice)
    if asked.session is not None and asked.session.seed:
        return child_seed(asked.session.seed, "turn", asked.session.num_turns)
    return secrets.randbits(63)


def _is_shown(request: GenerationRequest, update: Update) -> bool:
    """Tokens without text yet (half a character) are shown only where tokens or log-probs are asked for."""
    assert isinstance(request, ChatRequest | CompletionRequest)
    told = bool(update.text) or update.choice.finish_reason is not None
    return told or request.wants_logprobs or request.return_token_ids


async def _unless_gone(request: Request, work: Awaitable[list[Choice]]) -> list[Choice]:
    """The result, unless the client leaves first: then the work ends too, and nobody reads the answer."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_client_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "The client left.", None, "client_left")
    finally:
        working.cancel()
        leaving.cancel()


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: Json) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _refused(error: ApiError) -> JSONResponse:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else None
    return JSONResponse(error.body(), error.status, headers)


async def _http_error(request: Request, error: Any) -> Response:
    """Unknown paths and methods, in the same shape."""
    message = f"{request.method} {request.url.path}: {error.detail}."
    return _refused(ApiError(error.status_code, message, None, "unknown_url"))
