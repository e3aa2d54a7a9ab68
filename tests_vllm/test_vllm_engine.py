"""A real vLLM in another Python: what it samples is what the loaded weights say, before and after they change."""

from contextlib import contextmanager

import pytest
import torch
from small_models import FAMILIES, write_small_model
from transformers import AutoModelForCausalLM

from paceline.config.engine_schema import VllmSection
from paceline.rollout.protocol import RolloutRequest, SamplingParams
from paceline.rollout.remote.child import ChildCommand, EngineChild
from paceline.rollout.remote.engine import RemoteEngine, RemoteLimits
from paceline.rollout.vllm.arguments import ServedModel, engine_arguments, process_environment
from paceline.sync import WeightSyncError
from paceline.types import Prompt

PATIENT = 600.0
THREE_DECIMALS = 5e-4
STOP = frozenset({2})


class Words:
    def decode(self, ids, *, skip_special_tokens):
        return " ".join(map(str, ids))


@contextmanager
def vllm_serving(python, folder, family, kv_cache_gb):
    """vLLM serving a small model of a family, and the same model here."""
    write_small_model(folder / "model", family)
    settings = VllmSection(
        python=python,
        enforce_eager=True,
        kv_cache_gb=kv_cache_gb,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        block_size=32,  # short prompts fill pages too, so that there is something to reuse
    )
    arguments = engine_arguments(settings, ServedModel(str(folder / "model"), "float32", 96, 0, on_cpu=True))
    command = ChildCommand(
        "paceline.rollout.foreign.vllm_worker",
        {"arguments": arguments, "sleep_level": 1},
        python,
        process_environment(settings),
    )
    log = folder / "vllm.log"
    engine = RemoteEngine(
        "0", lambda notify: EngineChild("0", command, log, notify), Words(), RemoteLimits(PATIENT, PATIENT)
    )
    engine.wait_ready()
    model = AutoModelForCausalLM.from_pretrained(folder / "model").float().eval()
    try:
        yield engine, model
    finally:
        engine.close()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def served(request, python, tmp_path_factory):
    with vllm_serving(python, tmp_path_factory.mktemp("vllm"), request.param, kv_cache_gb=0.05) as both:
        yield both


def weights(model):
    return list(model.named_parameters())


def change(model, scale=0.05):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)


def requests(num_prompts=3, num_samples=4, limit=10):
    return [
        RolloutRequest(Prompt(f"p{i}", tuple(range(5, 40 + i)), ""), tuple(range(num_samples)), limit)
        for i in range(num_prompts)
    ]


@torch.no_grad()
def recomputed(model, request, sample, temperature):
    ids = torch.tensor([[*request.prompt.token_ids, *sample.token_ids]])
    start = len(request.prompt.token_ids)
    log_p = (model(ids).logits[0, start - 1 : -1].float() / (temperature or 1.0)).log_softmax(-1)
    return log_p.gather(-1, ids[0, start:, None]).squeeze(-1)


def assert_equal_to_a_recompute(engine, model, temperature=1.0):
    asked = requests()
    groups = engine.generate(asked, SamplingParams(temperature, STOP))
    for request, group in zip(asked, groups, strict=True):
        for sample in group:
            expected = recomputed(model, request, sample, temperature)
            torch.testing.assert_close(
                torch.tensor(sample.logprobs), expected, rtol=0, atol=THREE_DECIMALS, check_dtype=False
            )
            assert sample.finish_reason == ("stop" if sample.token_ids[-1] in STOP else "length")
            assert sample.weight_version == engine.weight_version
    return groups


def test_without_weights_nothing_is_sampled(served):
    engine, _ = served
    if not engine._has_weights:
        with pytest.raises(RuntimeError, match="random weights"):
            engine.generate(requests(1), SamplingParams(1.0, STOP))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_the_distribution_sampled_from(served, temperature):
    """Case 21: temperature included."""
    engine, model = served
    engine.load_weights(weights(model), 0)
    assert_equal_to_a_recompute(engine, model, temperature)


def test_changed_weights_are_used_with_a_prompt_seen_before(served):
    """Case 30: prefix cache on, the same prompts before and after; the new weights' log-probs, version by version."""
    engine, model = served
    engine.load_weights(weights(model), 1)
    before = assert_equal_to_a_recompute(engine, model)
    assert_equal_to_a_recompute(engine, model)
    cached = engine.stats.num_cached_tokens
    assert cached == 3 * 4 * 32  # every sample's prompt was there
    for version in (2, 3):
        change(model)
        engine.load_weights(weights(model), version)
        after = assert_equal_to_a_recompute(engine, model)
        assert engine.stats.num_cached_tokens < cached  # within the groups of this rollout only
    assert [[s.token_ids for s in g] for g in before] != [[s.token_ids for s in g] for g in after]
    assert engine.stats.num_generated_tokens == sum(len(s.token_ids) for g in after for s in g)


def test_equal_weights_change_no_logprob_over_many_loads(served):
    """Case 30 (d): loading the same weights again and again drifts nowhere."""
    engine, model = served
    tokens = list(range(5, 40))
    engine.load_weights(weights(model), 10)
    first = engine.score([tokens])
    for version in range(11, 21):
        engine.load_weights(weights(model), version)
    assert engine.score([tokens]) == first


def test_a_scored_prompt_equals_a_recompute(served):
    engine, model = served
    engine.load_weights(weights(model), 30)
    tokens = list(range(5, 40))
    with torch.no_grad():
        log_p = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = log_p.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)
    (found,) = engine.score([tokens])
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=THREE_DECIMALS)


def test_an_incomplete_load_is_no_new_version(served):
    """Case 30 (e): what vLLM is sent must be what it reads."""
    engine, model = served
    engine.load_weights(weights(model), 40)
    begin = engine.begin_load

    def cut(offer, published):
        (path,) = offer.arguments["paths"]
        with open(path, "r+b") as file:
            file.seek(-64, 2)
            file.write(b"\x00" * 64)
        return begin(offer, published)

    engine.begin_load = cut
    try:
        with pytest.raises(WeightSyncError, match="received"):
            engine.load_weights(weights(model), 41)
    finally:
        engine.begin_load = begin
    assert engine.weight_version == 40
    engine.load_weights(weights(model), 42)


def test_aborted_samples_keep_their_tokens_and_go_on_under_new_weights(served):
    engine, model = served
    engine.load_weights(weights(model), 50)
    (request,) = requests(1, 3, limit=50)
    params = SamplingParams(1.0, STOP, ignore_stop=True)
    handle = engine.submit(request, params)
    events = []
    while len(events) < 9:
        events += engine.step()
    events += engine.abort(handle)
    aborted = {event.sample_index: event.finished for event in events if event.finished}
    assert {sample.finish_reason for sample in aborted.values()} == {"abort"}
    change(model)
    engine.load_weights(weights(model), 51)
    again = RolloutRequest(request.prompt, request.seeds, 50, tuple(aborted[i] for i in range(3)))
    (group,) = engine.generate([again], params)
    for index, sample in enumerate(group):
        kept = len(aborted[index].token_ids)
        assert sample.token_ids[:kept] == aborted[index].token_ids and len(sample.token_ids) == 50
        assert sample.token_versions == (50,) * kept + (51,) * (50 - kept)
        expected = recomputed(model, request, sample, 1.0)[kept:]
        torch.testing.assert_close(
            torch.tensor(sample.logprobs[kept:]), expected, rtol=0, atol=THREE_DECIMALS, check_dtype=False
        )


def test_sleeping_blocks_nothing(served):
    engine, model = served
    engine.load_weights(weights(model), 60)
    engine.sleep()
    assert_equal_to_a_recompute(engine, model)


def test_a_request_beyond_the_context_is_refused_at_once(served):
    engine, model = served
    engine.load_weights(weights(model), 70)
    too_long = RolloutRequest(Prompt("p", tuple(range(3, 90)), ""), (0,), 20)
    with pytest.raises(ValueError, match=r"87 \+ 20 tokens exceed the engine's context of 96"):
        engine.submit(too_long, SamplingParams(1.0, STOP))


def test_a_full_cache_preempts_which_is_counted_and_changes_no_logprob(python, tmp_path):
    """Half a megabyte holds 512 tokens of this model; twelve samples of up to 87 tokens need twice that."""
    with vllm_serving(python, tmp_path, "llama", kv_cache_gb=0.0005) as (engine, model):
        engine.load_weights(weights(model), 0)
        asked = requests(3, 4, limit=50)
        groups = engine.generate(asked, SamplingParams(1.0, STOP, ignore_stop=True))
        assert engine.stats.num_preemptions > 0
        for request, group in zip(asked, groups, strict=True):
            for sample in group:
                assert len(sample.token_ids) == 50
                torch.testing.assert_close(
                    torch.tensor(sample.logprobs),
                    recomputed(model, request, sample, 1.0),
                    rtol=0,
                    atol=THREE_DECIMALS,
                    check_dtype=False,
                )
