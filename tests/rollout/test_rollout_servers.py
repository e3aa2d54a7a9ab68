"""Engines behind HTTP servers, against recorded conversations: SGLang's, and servers that fail."""

import json
import os
from pathlib import Path

import pytest
import torch
from replay_server import replay_server

from paceline.config.engine_schema import VllmSection
from paceline.rollout.errors import ReplicaDiedError, ReplicaError, ReplicaRefusedError
from paceline.rollout.protocol import RolloutRequest, SamplingParams
from paceline.rollout.remote.engine import RemoteEngine, RemoteLimits
from paceline.rollout.remote.weight_files import WeightTransfer
from paceline.rollout.server.http import HttpEndpoint
from paceline.rollout.server.link import ServerLink
from paceline.rollout.sglang.server import SglangApi
from paceline.rollout.vllm.arguments import ServedModel, engine_arguments
from paceline.rollout.vllm.server import server_command
from paceline.types import Prompt

EXCHANGES = json.loads((Path(__file__).parent / "recordings" / "sglang.json").read_text())["exchanges"]
WEIGHTS = [("a", torch.arange(6.0))]
REQUEST = RolloutRequest(Prompt("p", (5, 6, 7), ""), (11, 12), 4)
PARAMS = SamplingParams(0.5, frozenset({2}))


class Words:
    def decode(self, ids, *, skip_special_tokens):
        return " ".join(map(str, ids))


def engine_at(address, start_s=30.0):
    def open_link(notify):
        return ServerLink("0", SglangApi(HttpEndpoint(address, 30.0), can_sleep=True), notify)

    return RemoteEngine("0", open_link, Words(), RemoteLimits(start_s, 30.0, WeightTransfer("file", "/tmp")))


def altered(path, **changes):
    return [{**one, **changes} if one["path"] == path else one for one in EXCHANGES]


def test_sglang_samples_scores_sleeps_and_takes_weights_as_its_documentation_says():
    with replay_server(EXCHANGES) as (address, asked):
        engine = engine_at(address)
        engine.wait_ready()
        assert engine.facts["sglang"] == "0.5.6"
        engine.load_weights(WEIGHTS, version=7)
        (first, second) = engine.generate([REQUEST], PARAMS)[0]
        assert (first.token_ids, first.logprobs) == ((9, 8, 2), (-0.25, -1.5, -0.125))
        assert (second.token_ids, second.logprobs) == ((4, 3, 6, 5), (-0.5, -0.75, -1.0, -2.0))
        assert (first.finish_reason, second.finish_reason) == ("stop", "length")
        assert {first.weight_version, second.weight_version} == {7}
        assert engine.stats.num_cached_tokens == 3
        assert engine.score([[5, 6, 7]]) == [[-1.25, -2.5]]
        engine.sleep()
        engine.wake()
        paths = [path for _, path, _ in asked]
        assert paths.index("/resume_memory_occupation") < paths.index("/update_weights_from_disk")
        assert paths[-2:] == ["/release_memory_occupation", "/resume_memory_occupation"]
        (load,) = [body for _, path, body in asked if path == "/update_weights_from_disk"]
        assert not os.path.exists(load["model_path"])  # gone once it was loaded


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ({"success": False, "message": "no such folder"}, "load weights: no such folder"),
        ({"success": True, "message": ""}, "holds weight version 6 after loading 7"),
    ],
)
def test_a_load_that_did_not_happen_is_an_error_and_the_version_stays(response, message):
    exchanges = altered("/update_weights_from_disk", response=response)
    if response["success"]:
        exchanges = [
            {**one, "response": {"weight_version": "6"}} if one["path"] == "/get_model_info" else one
            for one in exchanges
        ]
    with replay_server(exchanges) as (address, _):
        engine = engine_at(address)
        with pytest.raises(ReplicaRefusedError, match=message):
            engine.load_weights(WEIGHTS, version=7)
        assert engine.weight_version == 0


def test_a_stream_that_breaks_off_is_a_dead_replica_not_a_short_sample():
    with replay_server(EXCHANGES, events_until=1) as (address, _):
        engine = engine_at(address)
        engine.load_weights(WEIGHTS, version=7)
        with pytest.raises(ReplicaDiedError, match="stream ended before the sample did"):
            engine.generate([REQUEST], PARAMS)


def test_a_request_the_server_refuses_is_said_with_its_status():
    exchanges = altered("/generate", status=400, response={"error": "too long"})
    exchanges = [{name: value for name, value in one.items() if name != "events"} for one in exchanges]
    with replay_server(exchanges) as (address, _):
        engine = engine_at(address)
        engine.load_weights(WEIGHTS, version=7)
        with pytest.raises(ReplicaError, match=r"HTTP 400.*too long"):
            engine.generate([REQUEST], PARAMS)


def test_a_full_server_is_waited_for_by_the_sample_it_turned_away():
    full = {
        "method": "POST",
        "path": "/generate",
        "request": {"rid": "paceline-0-0-7"},
        "status": 503,
        "times": 2,
    }
    with replay_server([full, *EXCHANGES]) as (address, asked):
        engine = engine_at(address)
        engine.load_weights(WEIGHTS, version=7)
        (first, second) = engine.generate([REQUEST], PARAMS)[0]
        assert (first.token_ids, second.token_ids) == ((9, 8, 2), (4, 3, 6, 5))
        assert len([path for _, path, _ in asked if path == "/generate"]) == 4


def test_a_server_that_is_not_there_is_named_with_its_address():
    engine = engine_at("http://127.0.0.1:9", start_s=0.5)
    with pytest.raises(ReplicaDiedError, match=r"worker 0, stage setup: http://127.0.0.1:9 does not serve"):
        engine.wait_ready()


def test_vllms_server_gets_the_same_arguments_as_its_process():
    settings = VllmSection(enable_prefix_caching=False, cudagraph_capture_sizes=(1, 2), max_num_seqs=7)
    arguments = engine_arguments(settings, ServedModel("m", "bfloat16", 512, 3, on_cpu=False))
    command = server_command("py", arguments, 8123, sleep_level=1)
    options = dict(zip(command, [*command[1:], ""], strict=True))
    assert options["--max-num-seqs"] == "7" and options["--max-model-len"] == "512"
    assert options["--gpu-memory-utilization"] == "0.5" and options["--logprobs-mode"] == "processed_logprobs"
    assert "--no-enable-prefix-caching" in command and "--enable-sleep-mode" in command
    assert json.loads(options["--compilation-config"]) == {"cudagraph_capture_sizes": [1, 2]}
    assert options["--host"] == "127.0.0.1" and options["--worker-extension-cls"].endswith("PacelineWeights")
