"""Episodes with tools: what is in a sample, what a tool may do wrong, and what the loop leaves behind."""

import sys
import time
from collections import deque
from pathlib import Path

import pytest
from tiny_tokenizer import make_tokenizer

from paceline.agents.calls import parse_calls
from paceline.agents.episodes import EpisodeLimits, EpisodeLoop, last_answer
from paceline.agents.tools import ToolPool, parameters_of, resolve_tools
from paceline.config import ConfigError
from paceline.data.turns import TurnRenderer
from paceline.rollout.protocol import RolloutRequest, SampleEvent, SamplingParams
from paceline.telemetry.ledger import Ledger
from paceline.types import Prompt, Sample

sys.path.insert(0, str(Path(__file__).parent))
TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id
PARAMS = SamplingParams(1.0, frozenset({END}))
PROMPT = Prompt(
    "p", tuple(TOKENIZER("<s>user\nq</s><s>assistant\n", add_special_tokens=False)["input_ids"]), ""
)


def ids(text):
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class Scripted:
    """An engine whose answers are written down: `script[seed]` are the turns of the sample with that seed, as token
    ids. One turn per step; every token of turn `n` has log-prob -n."""

    def __init__(self, script):
        self.weight_version = 7
        self._script = {seed: deque(turns) for seed, turns in script.items()}
        self._waiting, self._next, self.requests = {}, 0, []

    @property
    def has_work(self):
        return bool(self._waiting)

    def generate(self, requests, params, on_sample=None):
        assert not requests
        return []

    def submit(self, request, params):
        self._next += 1
        self._waiting[self._next] = request
        self.requests.append(request)
        return self._next

    def abort(self, request_id):
        self._waiting.pop(request_id, None)
        return []

    def step(self):
        waiting, self._waiting = self._waiting, {}
        return [event for number, request in waiting.items() for event in self._events(number, request)]

    def _events(self, number, request):
        for index, seed in enumerate(request.seeds):
            prefix = request.prefixes[index] if request.prefixes else None
            turn = self._script[seed].popleft()
            before = prefix.token_ids if prefix else ()
            turn = turn[: request.max_new_tokens - len(before)]
            reason = "stop" if turn[-1] == END else "length"
            logprobs = (*(prefix.logprobs if prefix else ()), *(-1.0,) * len(turn))
            masks = (*(prefix.loss_mask if prefix else ()), *(1,) * len(turn))
            sample = Sample(
                "p", index, (*before, *turn), logprobs, masks, reason, self.weight_version, seed, ""
            )
            yield SampleEvent(number, index, turn, (-1.0,) * len(turn), sample)


def play(script, tools=("tiny_agents:echo",), limit=200, timeout_s=20.0, workers=1, **limits):
    """Plays one episode per seed of `script`; the samples, the counts, the engine."""
    engine, ledger = Scripted(script), Ledger()
    limits = EpisodeLimits(**{"max_turns": 3, "max_turn_tokens": None, "max_output_tokens": 20, **limits})
    call_format = "tag" if all(tool != "tiny_agents:add" for tool in tools) else "json"
    loop = EpisodeLoop(
        engine,
        TOKENIZER,
        TurnRenderer(TOKENIZER),
        ToolPool(tools, workers, timeout_s),
        parameters_of(resolve_tools(tools), call_format),
        call_format,
        "tool",
        limits,
        ledger,
    )
    try:
        (samples,) = loop.generate([RolloutRequest(PROMPT, tuple(script), limit)], PARAMS)
    finally:
        loop.close()
    return samples, loop.counts, engine


def test_an_answer_without_a_call_is_the_whole_episode():
    (sample,), counts, _ = play({1: [(*ids("hello"), END)]})
    assert sample.token_ids == (*ids("hello"), END) and set(sample.loss_mask) == {1}
    assert sample.finish_reason == "stop" and (counts.num_turns, counts.num_calls) == (1, 0)


def test_a_tools_output_stands_behind_the_sampled_tokens_and_is_masked():
    hel_lo = (*ids("hel"), *ids("lo"))  # "hello" would be one token: case Re-tokenisation
    call = (*ids("<echo>"), *hel_lo, *ids("</echo>"), END)
    answer = (*ids("lo"), END)
    (sample,), counts, engine = play({1: [call, answer]})
    inserted = ids("<s>tool\nhello</s><s>assistant\n")
    assert sample.token_ids == (*call, *inserted, *answer)
    assert sample.loss_mask == (*(1,) * len(call), *(0,) * len(inserted), *(1,) * len(answer))
    assert all(
        (logprob == 0.0) == (mask == 0)
        for logprob, mask in zip(sample.logprobs, sample.loss_mask, strict=True)
    )
    assert last_answer(sample) == answer
    assert engine.requests[1].prompt.token_ids == PROMPT.token_ids
    assert engine.requests[1].prefixes[0].token_ids == (*call, *inserted)
    assert (counts.num_turns, counts.num_calls, counts.num_inserted_tokens) == (2, 1, len(inserted))


def test_several_calls_of_one_answer_are_answered_in_their_order():
    call = (*ids("<echo>a</echo> and <slow>b</slow> and <echo>c</echo>"), END)
    (sample,), counts, _ = play(
        {1: [call, (END,)]}, tools=("tiny_agents:echo", "tiny_agents:slow"), workers=2
    )
    expected = ids("<s>tool\na</s><s>tool\nb</s><s>tool\nc</s><s>assistant\n")
    assert sample.token_ids == (*call, *expected, END) and counts.num_calls == 3


@pytest.mark.parametrize(
    ("tool", "said", "field"),
    [
        ("fail", "Error: ValueError: planted", "num_errors"),
        ("hang", "Error: no result within 0.5 s", "num_timeouts"),
        ("die", "Error: the reward worker", "num_errors"),
    ],
)
def test_a_tool_that_fails_tells_the_model_and_the_episode_goes_on(tool, said, field):
    call = (*ids(f"<{tool}>x</{tool}>"), END)
    (sample,), counts, _ = play(
        {1: [call, (END,)]}, tools=(f"tiny_agents:{tool}",), timeout_s=0.5, max_output_tokens=200
    )
    assert f"<s>tool\n{said}" in TOKENIZER.decode(list(sample.token_ids))
    assert getattr(counts, field) == 1 and sample.finish_reason == "stop"


def test_one_hanging_tool_does_not_hold_the_others_up():
    scripts = {seed: [(*ids("<echo>x</echo>"), END), (END,)] for seed in range(6)}
    scripts[9] = [(*ids("<hang>x</hang>"), END), (END,)]
    started = time.monotonic()
    samples, counts, _ = play(
        scripts, tools=("tiny_agents:echo", "tiny_agents:hang"), workers=2, timeout_s=3.0
    )
    assert len(samples) == 7 and counts.num_timeouts == 1 and counts.num_errors == 0
    assert time.monotonic() - started < 150


def test_a_long_output_is_cut_and_counted():
    (sample,), counts, _ = play(
        {1: [(*ids("<long_output>x</long_output>"), END), (END,)]}, tools=("tiny_agents:long_output",)
    )
    assert counts.num_outputs_cut == 1
    assert sample.loss_mask.count(0) == 20 + len(ids("<s>tool\n</s><s>assistant\n"))


def test_turns_and_tokens_of_an_episode_are_bounded():
    call = (*ids("<echo>x</echo>"), END)
    (sample,), counts, _ = play({1: [call] * 9}, max_turns=2)
    assert counts.num_out_of_turns == 1 and sample.finish_reason == "length"
    assert last_answer(sample) == call
    (sample,), counts, _ = play({1: [call] * 9}, limit=len(call) + 10)
    assert counts.num_out_of_room == 1 and sample.token_ids == call
    assert sample.finish_reason == "length" and 0 not in sample.loss_mask
    (sample,), _, engine = play({1: [call, (END,)]}, max_turn_tokens=len(call), max_turns=9)
    assert engine.requests[0].max_new_tokens == len(call)
    (sample,), _, _ = play({1: [call]}, max_turn_tokens=3)
    assert sample.token_ids == call[:3] and sample.finish_reason == "length"


def test_malformed_calls_are_answered_and_counted():
    call = (*ids('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'), END)
    wrong = (*ids('<tool_call>{"name": "sub"}</tool_call>'), END)
    (sample,), counts, _ = play({1: [call, wrong, (END,)]}, tools=("tiny_agents:add",), max_output_tokens=100)
    text = TOKENIZER.decode(list(sample.token_ids))
    assert "<s>tool\n5</s>" in text and "there is no tool 'sub'" in text
    assert (counts.num_calls, counts.num_malformed) == (2, 1)


def test_an_error_in_the_loop_leaves_no_request_in_the_engine():
    engine = Scripted({1: [(*ids("<echo>x</echo>"), END), (END,)], 2: [(END,)]})
    loop = EpisodeLoop(
        engine,
        TOKENIZER,
        TurnRenderer(TOKENIZER),
        ToolPool(("tiny_agents:echo",), 1, 20.0),
        {"echo": ["text"]},
        "tag",
        "tool",
        EpisodeLimits(3, None, 20),
        Ledger(),
    )

    def fail(index, sample):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        loop.generate([RolloutRequest(PROMPT, (1, 2), 50)], PARAMS, fail)
    loop.close()
    assert not engine.has_work and not loop._active and not loop._calls


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool_call>{bad</tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", 'an object with "name"'),
        ('<tool_call>{"name": "f", "arguments": {"z": 1}}</tool_call>', "f takes a, b"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f takes a, b"),
    ],
)
def test_calls_that_cannot_be_made_say_why(text, said):
    (call,) = parse_calls(text, "json", {"f": ["a", "b"]})
    assert said in call.reason


def test_text_that_only_looks_like_a_call_is_none():
    assert parse_calls("<tool_call> unfinished", "json", {"f": []}) == []
    assert parse_calls("<other>x</other> <f>open", "tag", {"f": ["a"]}) == []


def test_tools_that_cannot_be_found_or_called_are_refused():
    with pytest.raises(ConfigError, match="no function"):
        resolve_tools(["tiny_agents:nothing"])
    with pytest.raises(ConfigError, match="importing"):
        resolve_tools(["no_such_module:f"])
    with pytest.raises(ConfigError, match="two tools"):
        resolve_tools(["tiny_agents:echo", "tiny_agents:echo"])
    with pytest.raises(ConfigError, match="one argument"):
        parameters_of(resolve_tools(["tiny_agents:add"]), "tag")
