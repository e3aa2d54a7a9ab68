"""The native engine round by round: requests come, go, and go on; nothing stays behind."""

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

from paceline.rollout import NativeEngine, RolloutRequest, SamplingParams
from paceline.rollout.native.engine import EngineLimits
from paceline.telemetry.ledger import Ledger
from paceline.types import Prompt

HEADER = tuple(range(10, 32))
SAMPLED = SamplingParams(0.9, frozenset({2}))
ENDLESS = SamplingParams(0.9, frozenset(), ignore_stop=True)


class Words:
    """Stands for a tokenizer: token ids as text."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def engine(max_running=64, budget=4096, **limits):
    return NativeEngine(tiny_model(), Words(), EngineLimits(max_running, budget, **limits), Ledger())


def request(number=0, num_samples=2, limit=8, **rest):
    prompt = Prompt(f"p{number}", (*HEADER, 40 + number, *range(50, 50 + number)), "")
    return RolloutRequest(prompt, tuple(1000 * number + i for i in range(num_samples)), limit, **rest)


def drain(native, events=()):
    """Goes round until nothing is left; every request's finished samples."""
    events = list(events)
    while native.has_work:
        events += native.step()
    finished: dict[int, dict[int, object]] = {}
    for event in events:
        if event.finished:
            finished.setdefault(event.request_id, {})[event.sample_index] = event.finished
    return {number: tuple(found[i] for i in sorted(found)) for number, found in finished.items()}


def assert_empty(native):
    assert not native.has_work and native.num_running == 0
    assert not native._submissions and not native._unfinished


def tokens(group):
    return [sample.token_ids for sample in group]


def logprobs(groups):
    return torch.tensor([value for group in groups for sample in group for value in sample.logprobs])


@pytest.mark.parametrize(("max_running", "budget"), [(64, 4096), (3, 4096), (64, 30)])
def test_submitting_everything_and_stepping_is_generating(max_running, budget):
    asked = [request(number, 3) for number in range(4)]
    expected = engine().generate(asked, SAMPLED)
    native = engine(max_running, budget)
    numbers = [native.submit(one, SAMPLED) for one in asked]
    finished = drain(native)
    assert [tokens(finished[number]) for number in numbers] == [tokens(group) for group in expected]
    assert_empty(native)


def test_events_carry_every_token_once_and_in_order():
    native = engine()
    numbers = [native.submit(request(number), SAMPLED) for number in range(3)]
    seen: dict[tuple[int, int], list[int]] = {}
    finished = {}
    while native.has_work:
        for event in native.step():
            seen.setdefault((event.request_id, event.sample_index), []).extend(event.token_ids)
            if event.finished:
                finished[event.request_id, event.sample_index] = event.finished
    assert set(finished) == {(number, index) for number in numbers for index in range(2)}
    assert all(tuple(seen[key]) == sample.token_ids for key, sample in finished.items())


def test_a_round_prefills_one_row_and_decodes_everyone():
    native = engine(budget=30)  # one prompt per row
    first, second = (native.submit(request(number, 1), ENDLESS) for number in range(2))
    assert {event.request_id for event in native.step()} == {first}
    assert {event.request_id for event in native.step()} == {first, second}


def test_a_request_that_comes_late_gets_the_tokens_it_would_get_alone():
    alone = engine().generate([request(1, 3)], SAMPLED)[0]
    native = engine()
    native.submit(request(0, 2, limit=30), ENDLESS)
    for _ in range(3):
        native.step()
    late = native.submit(request(1, 3), SAMPLED)  # the cache grows under the running samples
    assert tokens(drain(native)[late]) == tokens(alone)
    assert_empty(native)


def test_a_longer_request_grows_the_cache_or_waits_where_the_memory_is_bounded():
    alone = engine().generate([request(1, 1, limit=90)], ENDLESS)[0]
    short = engine().generate([request(0, 1, limit=10)], ENDLESS)[0]
    bound = 4 * 32 * engine().layout.bytes_per_token
    for native in (engine(), engine(max_cache_bytes=bound)):
        early = native.submit(request(0, 1, limit=10), ENDLESS)
        native.step()
        late = native.submit(request(1, 1, limit=90), ENDLESS)
        native.step()
        assert native.num_running == (2 if native._limits.max_cache_bytes is None else 1)
        finished = drain(native)
        assert (tokens(finished[early]), tokens(finished[late])) == (tokens(short), tokens(alone))
        assert native.stats.cache_bytes <= bound or native._limits.max_cache_bytes is None


def test_each_request_has_its_own_temperature_stop_tokens_and_limit():
    native = engine()
    plans = [
        (request(0, 2), SamplingParams(0.0, frozenset({2}))),
        (request(1, 3, limit=5), ENDLESS),
        (request(2, 2, limit=20), SamplingParams(1.7, frozenset(range(0, 97, 3)))),
    ]
    numbers = [native.submit(*plan) for plan in plans]
    finished = drain(native)
    for number, (asked, params) in zip(numbers, plans, strict=True):
        alone = engine().generate([asked], params)
        assert tokens(finished[number]) == tokens(alone[0])
        torch.testing.assert_close(logprobs([finished[number]]), logprobs(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_an_aborted_request_goes_on_where_it_stopped(rounds):
    asked = request(1, 3, limit=12)
    (whole,) = engine().generate([asked], ENDLESS)
    native = engine()
    other = native.submit(request(0, 2, limit=20), ENDLESS)
    number = native.submit(asked, ENDLESS)
    events = [event for _ in range(rounds) for event in native.step()]
    aborted = native.abort(number)
    assert [event.finished.finish_reason for event in aborted] == ["abort"] * 3
    kept = tuple(event.finished for event in sorted(aborted, key=lambda event: event.sample_index))
    assert [len(sample.token_ids) for sample in kept] == [rounds + 1 if rounds else 0] * 3
    again = native.submit(replace(asked, prefixes=kept), ENDLESS)
    finished = drain(native, events)
    assert tokens(finished[again]) == tokens(whole)
    torch.testing.assert_close(logprobs([finished[again]]), logprobs([whole]), rtol=0, atol=1e-5)
    for sample, prefix in zip(finished[again], kept, strict=True):
        assert sample.logprobs[: len(prefix.logprobs)] == prefix.logprobs
    assert tokens(finished[other]) == tokens(engine().generate([request(0, 2, limit=20)], ENDLESS)[0])
    assert_empty(native)


def test_tokens_are_tagged_with_the_version_that_sampled_them():
    native = engine()
    native.load_weights((), version=3)
    number = native.submit(request(0, 1, limit=9), ENDLESS)
    for _ in range(2):
        native.step()
    (event,) = native.abort(number)
    assert event.finished.weight_version == 3 and event.finished.token_versions == ()
    native.load_weights((), version=4)
    again = native.submit(request(0, 1, limit=9, prefixes=(event.finished,)), ENDLESS)
    (sample,) = drain(native)[again]
    assert sample.token_versions == (3, 3, 3, 4, 4, 4, 4, 4, 4)
    assert sample.weight_version == 3


def test_resumed_tokens_have_the_logprobs_of_the_new_weights():
    native = engine()
    number = native.submit(request(0, 1, limit=9), ENDLESS)
    native.step()
    (event,) = native.abort(number)
    weights = dict(native._model.module.named_parameters())
    native.load_weights([("model.norm.weight", weights["model.norm.weight"].detach() * 0.5)], version=1)
    again = native.submit(request(0, 1, limit=9, prefixes=(event.finished,)), ENDLESS)
    (sample,) = drain(native)[again]
    one_step = engine()
    one_step.load_weights([("model.norm.weight", weights["model.norm.weight"].detach())], version=1)
    (expected,) = one_step.generate([request(0, 1, limit=9, prefixes=(event.finished,))], ENDLESS)[0]
    assert sample.token_ids == expected.token_ids
    assert sample.logprobs == expected.logprobs


def test_weights_that_do_not_fit_are_refused_and_the_version_stays():
    native = engine()
    for name, tensor in (("nothing", torch.zeros(1)), ("model.norm.weight", torch.zeros(3))):
        with pytest.raises(ValueError, match="no parameter"):
            native.load_weights([(name, tensor)], version=9)
    assert native.weight_version == 0


def test_a_prefix_that_is_finished_is_handed_over_as_it_is():
    native = engine()
    (done, other), _ = native.generate([request(0, 2), request(1, 1)], ENDLESS)
    cut = replace(
        other,
        token_ids=other.token_ids[:2],
        logprobs=other.logprobs[:2],
        loss_mask=(1, 0),
        finish_reason="abort",
    )
    number = native.submit(request(0, 2, prefixes=(done, cut)), ENDLESS)
    finished = drain(native)[number]
    assert finished[0] == done
    assert finished[1].token_ids == other.token_ids and finished[1].loss_mask == (1, 0, *(1,) * 6)
    full = native.submit(request(0, 1, limit=2, prefixes=(cut,)), ENDLESS)
    assert drain(native)[full][0].finish_reason == "length"


def test_aborting_everything_at_any_time_leaves_nothing_behind():
    native = engine(max_running=4)
    for rounds in range(5):
        numbers = [native.submit(request(number, 3), ENDLESS) for number in range(4)]
        for _ in range(rounds):
            native.step()
        aborted = [event for number in numbers for event in native.abort(number)]
        assert sum(event.finished is not None for event in aborted) <= 12
        assert_empty(native)
    assert native.abort(10**6) == []
    assert tokens(native.generate([request(2)], SAMPLED)[0]) == tokens(
        engine().generate([request(2)], SAMPLED)[0]
    )


def test_an_error_in_the_callers_hands_leaves_the_engine_usable():
    native = engine(max_running=4)

    def fail(index, sample):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        native.generate([request(number, 3) for number in range(4)], SAMPLED, fail)
    assert_empty(native)


def test_a_round_that_raises_loses_no_slot(monkeypatch):
    native = engine()
    number = native.submit(request(0), ENDLESS)
    monkeypatch.setattr("paceline.rollout.native.engine.scaled_logits", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        native.step()
    assert [event.finished.finish_reason for event in native.abort(number)] == ["abort", "abort"]
    assert_empty(native)


def test_generating_and_sleeping_refuse_while_requests_are_in_progress():
    native = engine()
    number = native.submit(request(0), ENDLESS)
    native.step()
    with pytest.raises(RuntimeError, match="without work"):
        native.generate([request(1)], SAMPLED)
    with pytest.raises(RuntimeError, match="abort"):
        native.sleep()
    native.abort(number)
    native.sleep()
    assert native._cache is None
