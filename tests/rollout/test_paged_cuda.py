"""The paged engine on a CUDA device: kernels, captures, log-probs, and memory that comes and goes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_rollout_native import SAMPLED, Words, requests
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.families import check_family
from paceline.model.fused import fuse_for_device
from paceline.model.inputs import packed_inputs, score
from paceline.model.loading import wrap_model
from paceline.model.logprob_head import HeadSettings
from paceline.rollout.native.paged import PagedEngine, PagedLimits
from paceline.telemetry.ledger import Ledger

pytestmark = pytest.mark.gpu
CHECKS = Path(__file__).parents[2] / "benchmarks" / "check_paged_kernels.py"


def engine(family="qwen3", dtype=torch.bfloat16, fused=True, **limits):
    device = torch.device("cuda")
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=dtype).to(device)
    model = wrap_model(module, device, check_family(FAMILIES[family], type(module)))
    if fused:
        fuse_for_device(module, device)
    return PagedEngine(model, Words(), PagedLimits(12, 64, **limits), Ledger())


def test_kernels_agree_with_their_references():
    done = subprocess.run([sys.executable, str(CHECKS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_sampled_logprobs_are_the_trainers(family, dtype, tolerance, fused):
    native = engine(family, dtype, fused)
    asked = requests()
    groups = native.generate(asked, SAMPLED)
    assert native.runner.captured_sizes
    items = [
        PackItem(r.prompt.token_ids, tuple(s.token_ids for s in g))
        for r, g in zip(asked, groups, strict=True)
    ]
    model = native._model
    with torch.no_grad():
        inputs = packed_inputs(build_pack(items, share_prefixes=False), model.device)
        scored, _ = score(model, inputs, HeadSettings(SAMPLED.temperature, model.logit_softcap, 16))
    sampled = torch.tensor([lp for g in groups for s in g for lp in s.logprobs], device=model.device)
    assert (scored - sampled).abs().mean() <= tolerance
    assert native.num_held_pages == 0


def test_captured_and_written_out_rounds_draw_the_same_tokens():
    found = [
        [
            [s.token_ids for s in g]
            for g in engine(captures=captures, overlap=overlap).generate(requests(), SAMPLED)
        ]
        for captures in (True, False)
        for overlap in (True, False)
    ]
    assert all(one == found[0] for one in found)


def test_sleeping_leaves_nothing_behind():
    native = engine()
    native.generate(requests(), SAMPLED)
    native.sleep()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(50):
        native.generate(requests(num_prompts=1), SAMPLED)
        native.sleep()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
