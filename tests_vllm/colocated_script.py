"""Run in vLLM's own Python by test_vllm_colocated.py: vLLM in this very process, weights handed over as tensors."""

import sys

import torch
from transformers import AutoModelForCausalLM

from paceline.config.engine_schema import VllmSection
from paceline.rollout.protocol import RolloutRequest, SamplingParams
from paceline.rollout.remote.engine import RemoteEngine, RemoteLimits
from paceline.rollout.remote.weight_files import WeightTransfer
from paceline.rollout.vllm.arguments import ServedModel, engine_arguments
from paceline.rollout.vllm.colocated import open_link
from paceline.types import Prompt


class Words:
    def decode(self, ids, *, skip_special_tokens):
        return " ".join(map(str, ids))


def main(folder):
    settings = VllmSection(
        mode="colocated", enforce_eager=True, kv_cache_gb=0.05, max_num_seqs=16, max_num_batched_tokens=512
    )
    arguments = engine_arguments(settings, ServedModel(folder, "float32", 96, 0, on_cpu=True))
    engine = RemoteEngine(
        "0",
        lambda notify: open_link("0", arguments, 1, notify),
        Words(),
        RemoteLimits(600.0, 600.0, WeightTransfer("direct")),
    )
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    request = RolloutRequest(Prompt("p", tuple(range(5, 40)), ""), tuple(range(4)), 10)
    for version in range(3):
        engine.load_weights(list(model.named_parameters()), version)
        (group,) = engine.generate([request], SamplingParams(0.7, frozenset({2})))
        for sample in group:
            ids = torch.tensor([[*request.prompt.token_ids, *sample.token_ids]])
            with torch.no_grad():
                log_p = (model(ids).logits[0, 34:-1] / 0.7).log_softmax(-1)
            expected = log_p.gather(-1, ids[0, 35:, None]).squeeze(-1)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=5e-4)
            assert sample.weight_version == version
        engine.sleep()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    engine.close()
    print("colocated: equal")


if __name__ == "__main__":
    main(sys.argv[1])
