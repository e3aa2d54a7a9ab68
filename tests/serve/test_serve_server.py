"""The server as clients meet it: OpenAI's own client, and raw requests that are wrong."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import openai
import pytest
from tiny_models import tiny_model
from tiny_tokenizer import make_tokenizer

from paceline.data.seeds import child_seed
from paceline.rollout import NativeEngine, PagedEngine, RolloutRequest, SamplingParams
from paceline.rollout.native.engine import EngineLimits
from paceline.rollout.native.paged import PagedLimits
from paceline.serve.app import ServeApp, ServedModel
from paceline.serve.engine_loop import EngineLoop
from paceline.serve.guard import ServeLimits
from paceline.serve.server import engine_thread, http_thread
from paceline.telemetry.ledger import Ledger
from paceline.types import Prompt

CONTEXT = 128
HELLO = [{"role": "user", "content": "hi"}]


@dataclass
class Served:
    url: str
    engine: NativeEngine | PagedEngine
    app: ServeApp
    tokenizer: object

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def post(self, path: str, body: object, **headers: str) -> tuple[int, dict, dict]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        connection.request("POST", path, raw, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), dict(answer.getheaders())

    def wait_until_empty(self) -> None:
        """Everything that was asked for has been given back."""
        deadline = time.monotonic() + 60
        while self.engine.has_work or self.app._loop.num_active or self.app.counters.in_flight:
            assert time.monotonic() < deadline, "a request left a slot behind"
            time.sleep(0.01)
        assert self.num_held == 0

    def wait_until_in_flight(self, num_choices: int) -> None:
        """The server has heard of every choice asked for, and of every client that left."""
        deadline = time.monotonic() + 30
        while self.app.counters.in_flight != num_choices:
            assert time.monotonic() < deadline, f"{self.app.counters.in_flight} choices are in flight"
            time.sleep(0.01)

    @property
    def num_held(self) -> int:
        """Pages of the KV cache that somebody refers to; slots, and requests that wait for one, without pages."""
        engine = self.engine
        if isinstance(engine, PagedEngine):
            return engine.num_held_pages + engine.num_running
        return engine.num_running + len(engine._submissions)


def small_engine(cache: str = "slots") -> tuple[NativeEngine | PagedEngine, ServedModel]:
    tokenizer = make_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    engine: NativeEngine | PagedEngine
    if cache == "slots":
        engine = NativeEngine(model, tokenizer, EngineLimits(8, 256), Ledger())
    else:  # as on a GPU: a round is under way while the one before is read
        engine = PagedEngine(model, tokenizer, PagedLimits(8, 256, page_tokens=4, overlap=True), Ledger())
    return engine, ServedModel("tiny", tokenizer, frozenset({tokenizer.eos_token_id}), CONTEXT)


@pytest.fixture(scope="module", params=["slots", "paged"])
def served(request) -> Iterator[Served]:
    engine, model = small_engine(request.param)
    loop = EngineLoop(engine)
    limits = ServeLimits(max_body_bytes=20_000, max_new_tokens=120, max_in_flight=16)
    app = ServeApp(loop, model, limits)
    with engine_thread(loop, engine._ledger), http_thread(app) as url:
        yield Served(url, engine, app, model.tokenizer)


def test_chat_through_the_official_client_returns_text_tokens_and_logprobs(served):
    answer = served.client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=6,
        seed=3,
        n=2,
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert answer.usage.completion_tokens == 12 and len(answer.choices) == 2
    prompt = served.tokenizer("<s>user\nhi</s><s>assistant\n", add_special_tokens=False)["input_ids"]
    assert answer.prompt_token_ids == prompt and answer.usage.prompt_tokens == len(prompt)
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert len(choice.logprobs.content) == len(choice.token_ids) == 6
        assert choice.message.content == served.tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert all(row.logprob <= 0 for row in choice.logprobs.content)
    assert answer.choices[0].token_ids != answer.choices[1].token_ids


def test_a_seed_gives_the_same_tokens_again_and_they_are_the_engines(served):
    ask = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "logprobs": 0}
    extra = {"return_token_ids": True, "ignore_eos": True}
    first, second = (
        served.client.completions.create(**ask, seed=11, extra_body=extra).choices[0] for _ in range(2)
    )
    assert first.token_ids == second.token_ids
    served.wait_until_empty()
    prompt = Prompt("p", tuple(served.tokenizer("hello")["input_ids"]), "")
    engine, _ = small_engine("paged" if isinstance(served.engine, PagedEngine) else "slots")
    request = RolloutRequest(prompt, (child_seed(11, "serve", 0, 0),), 8)
    ((alone,),) = engine.generate([request], SamplingParams(1.0, frozenset(), ignore_stop=True))
    assert tuple(first.token_ids) == alone.token_ids
    assert first.logprobs.token_logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_brings_the_same_answer_in_pieces_and_its_usage(served, kind):
    extra = {"return_token_ids": True, "ignore_eos": True}
    rest = {"model": "tiny", "max_tokens": 9, "seed": 5, "temperature": 0.7, "extra_body": extra}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "chat":
        create, ask = served.client.chat.completions.create, {"messages": HELLO}
        whole = create(**ask, **rest).choices[0]
        text, pieces = whole.message.content, list(create(**ask, **rest, **options))
        assert pieces[0].choices[0].delta.role == "assistant"
        shown = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    else:
        create, ask = served.client.completions.create, {"prompt": [65, 66, 67]}
        whole = create(**ask, **rest).choices[0]
        text, pieces = whole.text, list(create(**ask, **rest, **options))
        shown = "".join(p.choices[0].text for p in pieces if p.choices)
    assert shown == text
    tokens = [t for p in pieces if p.choices for t in getattr(p.choices[0], "token_ids", None) or []]
    assert tokens == whole.token_ids and len(pieces) > 3
    assert pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].usage.completion_tokens == 9
    served.wait_until_empty()


def test_greedy_is_temperature_zero_and_stop_texts_end_a_choice(served):
    ask = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 20}
    whole = served.client.chat.completions.create(**ask, extra_body={"ignore_eos": True}).choices[0]
    text = whole.message.content
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    cut = served.client.chat.completions.create(**ask, stop=[stop], extra_body={"ignore_eos": True}).choices[
        0
    ]
    assert cut.message.content == text[: text.find(stop)]
    assert cut.finish_reason == "stop"
    served.wait_until_empty()


def test_several_prompts_have_their_choices_in_order(served):
    answer = served.client.completions.create(
        model="tiny", prompt=["hello", "lo"], n=2, max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(answer.prompt_token_ids) == 2


def test_models_health_and_metrics_answer(served):
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").max_model_len == CONTEXT
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read())["status"] == "ok"
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    assert "paceline_serve_generated_tokens_total" in text and text.endswith("# EOF\n")


CHAT = {"model": "tiny", "messages": HELLO, "max_tokens": 4}
WRONG = {
    "prompt and limit beyond the context": ({**CHAT, "max_tokens": 119}, 400, "context_length_exceeded"),
    "prompt beyond the context": (
        {**CHAT, "messages": [{"role": "user", "content": "x" * 300}]},
        400,
        "context_length_exceeded",
    ),
    "limit beyond the server's": ({**CHAT, "max_tokens": 121}, 400, "invalid_value"),
    "negative temperature": ({**CHAT, "temperature": -0.1}, 400, "invalid_value"),
    "temperature that is text": ({**CHAT, "temperature": "hot"}, 400, "invalid_value"),
    "temperature that is no number": ({**CHAT, "temperature": float("nan")}, 400, "invalid_value"),
    "no tokens asked for": ({**CHAT, "max_tokens": 0}, 400, "invalid_value"),
    "unknown field": ({**CHAT, "temprature": 1.0}, 400, "unknown_parameter"),
    "unknown field in a message": (
        {**CHAT, "messages": [{**HELLO[0], "colour": "red"}]},
        400,
        "unknown_parameter",
    ),
    "wrong model": ({**CHAT, "model": "gpt-x"}, 404, "model_not_found"),
    "no messages": ({"model": "tiny"}, 400, "missing_required_parameter"),
    "empty messages": ({**CHAT, "messages": []}, 400, "invalid_value"),
    "top_p": ({**CHAT, "top_p": 0.9}, 400, "unsupported_value"),
    "penalty": ({**CHAT, "presence_penalty": 0.5}, 400, "unsupported_value"),
    "top_logprobs": ({**CHAT, "logprobs": True, "top_logprobs": 3}, 400, "unsupported_value"),
    "n beyond the choices in flight": ({**CHAT, "n": 17}, 503, "overloaded"),
    "empty stop": ({**CHAT, "stop": [""]}, 400, "invalid_value"),
    "not JSON": (b'{"model": ', 400, "invalid_json"),
    "not an object": ([1, 2], 400, "invalid_value"),
    "oversized": ({**CHAT, "user": "u" * 30_000}, 413, "request_too_large"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_gets_its_status_in_openais_shape_and_never_reaches_the_engine(served, name):
    body, status, code = WRONG[name]
    served.wait_until_empty()
    before = served.app._loop.counts.num_requests
    # asked for as a stream, it is no stream
    for asked in [body, {**body, "stream": True}] if isinstance(body, dict) else [body]:
        found, answer, _ = served.post("/v1/chat/completions", asked)
        assert (found, answer["error"]["code"]) == (status, code), answer
        assert set(answer["error"]) == {"message", "type", "param", "code"} and answer["error"]["message"]
    served.wait_until_empty()
    assert served.app._loop.counts.num_requests == before


def test_wrong_completions_unknown_paths_and_methods_have_the_same_shape(served):
    before = served.app._loop.counts.num_requests
    for body, code in (
        ({"model": "tiny", "prompt": [999_999]}, "invalid_value"),
        ({"model": "tiny", "prompt": [[1, -1]]}, "invalid_value"),
        ({"model": "tiny", "prompt": ""}, "invalid_value"),
        ({"model": "tiny", "prompt": "a", "echo": True}, "unsupported_value"),
    ):
        status, answer, _ = served.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, code)
    assert served.post("/v1/embeddings", {})[0] == 404
    assert served.post("/v1/models", {})[0] == 405
    status, answer, _ = served.post("/v1/chat/completions", CHAT, **{"content-type": "text/plain"})
    assert status == 415 and answer["error"]["type"] == "invalid_request_error"
    served.wait_until_empty()
    assert served.app._loop.counts.num_requests == before


def test_the_official_client_raises_its_own_errors(served):
    with pytest.raises(openai.BadRequestError) as raised:
        served.client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert raised.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        served.client.chat.completions.create(model="other", messages=HELLO)


def test_a_body_that_lies_about_its_length_is_cut_off_at_the_limit(served):
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
    chunks = (b"x" * 5_000 for _ in range(10))
    connection.request(
        "POST", "/v1/chat/completions", chunks, {"content-type": "application/json"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413
    served.wait_until_empty()


class Gate:
    """In the place of an engine's `step`: nothing runs until the engine has `num_requests`, then so many rounds, and
    no more until the gate is opened. What happens meanwhile happens in the middle of every one of them."""

    def __init__(self, served: Served, num_requests: int, num_rounds: int) -> None:
        self._loop, self._step = served.app._loop, served.engine.step
        self._num_requests, self._num_rounds = num_requests, num_rounds
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        if not self.reached.is_set():
            if self._loop.num_active < self._num_requests:
                time.sleep(0.001)
                return []
            if self._num_rounds > 0:
                self._num_rounds -= 1
                return self._step()
            self.reached.set()
        assert self.opened.wait(60)
        return self._step()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(served, stream, monkeypatch):
    """It leaves in the middle, for certain: the engine stands still until the server has noticed."""
    counts = served.app._loop.counts
    body = {**CHAT, "max_tokens": 100, "ignore_eos": True, "n": 4, "stream": stream, "stop": "\x00"}
    for _ in range(3):
        before = counts.num_cancelled, counts.num_finished_samples
        gate = Gate(served, num_requests=4, num_rounds=3)  # a stop text makes a request of every choice
        monkeypatch.setattr(served.engine, "step", gate)
        try:
            connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
            )
            if stream:
                connection.getresponse().readline()
            assert gate.reached.wait(60) and served.num_held >= 4
            connection.sock.close() if connection.sock else None
            connection.close()
            served.wait_until_in_flight(0)
        finally:
            gate.opened.set()
            monkeypatch.undo()
        served.wait_until_empty()
        assert (counts.num_cancelled, counts.num_finished_samples) == (before[0] + 4, before[1])


def test_a_stream_that_is_closed_early_by_the_client_is_cancelled(served, monkeypatch):
    counts = served.app._loop.counts
    before = counts.num_cancelled, counts.num_finished_samples
    gate = Gate(served, num_requests=1, num_rounds=5)
    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "step", gate)
        try:
            stream = served.client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            assert gate.reached.wait(60) and served.num_held > 0
            stream.close()
            served.wait_until_in_flight(0)
        finally:
            gate.opened.set()
        served.wait_until_empty()
    assert (counts.num_cancelled, counts.num_finished_samples) == (before[0] + 1, before[1])


def test_a_client_that_leaves_before_the_engine_has_heard_of_it_costs_nothing(served, monkeypatch):
    counts = served.app._loop.counts
    before = counts.num_requests, counts.num_finished_samples
    gate = Gate(served, num_requests=1, num_rounds=2)
    body = json.dumps({**CHAT, "ignore_eos": True})
    netloc, json_type = urlsplit(served.url).netloc, {"content-type": "application/json"}
    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "step", gate)
        try:
            stays, leaves = (http.client.HTTPConnection(netloc, timeout=60) for _ in range(2))
            stays.request("POST", "/v1/chat/completions", body, json_type)
            assert gate.reached.wait(60)
            leaves.request("POST", "/v1/chat/completions", body, json_type)
            served.wait_until_in_flight(2)
            leaves.close()
            served.wait_until_in_flight(1)
        finally:
            gate.opened.set()
        assert stays.getresponse().status == 200
    served.wait_until_empty()
    assert (counts.num_requests, counts.num_finished_samples) == (before[0] + 1, before[1] + 1)


def test_an_engine_that_fails_says_so_and_serves_the_next_request(served, monkeypatch):
    def fail(*_):
        raise ArithmeticError("planted")

    with monkeypatch.context() as patch:
        for engine in ("native.engine", "native.paged.runner"):
            patch.setattr(f"paceline.rollout.{engine}.scaled_logits", fail)
        status, answer, _ = served.post("/v1/chat/completions", CHAT)
        assert status == 500 and "planted" in answer["error"]["message"]
    served.wait_until_empty()
    assert served.post("/v1/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize("cache", ["slots", "paged"])
def test_a_key_is_required_where_there_is_one_and_requests_are_limited(cache):
    engine, model = small_engine(cache)
    loop = EngineLoop(engine)
    app = ServeApp(loop, model, ServeLimits(requests_per_minute=1), api_key="s3cret")
    with engine_thread(loop, engine._ledger), http_thread(app) as url:
        served = Served(url, engine, app, model.tokenizer)
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            status, answer, _ = served.post("/v1/chat/completions", CHAT, **header)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        served.wait_until_empty()
        assert loop.counts.num_requests == 0
        key = {"authorization": "Bearer s3cret"}
        assert served.post("/v1/chat/completions", CHAT, **key)[0] == 200
        status, answer, headers = served.post("/v1/chat/completions", CHAT, **key)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(headers["retry-after"]) <= 60
        served.wait_until_empty()
        assert loop.counts.num_requests == 1


def test_without_a_key_only_this_machines_names_are_answered(served):
    status, answer, _ = served.post("/v1/chat/completions", CHAT, host="example.org")
    assert (status, answer["error"]["code"]) == (403, "forbidden_host")


def test_a_sessions_turns_continue_on_the_sampled_tokens(served):
    client = openai.OpenAI(base_url=f"{served.url}/sessions/ep1/v1", api_key="unused")
    messages = [*HELLO]
    for question in ("more", "and"):
        extra = {"return_token_ids": True}
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=5, extra_body=extra
        )
        last = answer
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
        messages += [{"role": "user", "content": question}]
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
    connection.request("DELETE", "/sessions/ep1")
    (sample,) = json.loads(connection.getresponse().read())["samples"]
    everything = sample["prompt_token_ids"] + sample["token_ids"]
    assert everything == last.prompt_token_ids + last.choices[0].token_ids
    masks = sample["loss_mask"]
    assert masks[0] == 1 and 0 in masks and masks[-1] == 1
    assert all(lp == 0.0 for lp, mask in zip(sample["logprobs"], masks, strict=True) if not mask)
    connection.request("GET", "/sessions/ep1")
    assert connection.getresponse().status == 404
