"""The backward pass's peak as estimated against live bytes of real sizes."""

import pytest
from live_bytes import layer_peaks

from paceline.bench.shapes import shape_config
from paceline.config.schema import TrainSection
from paceline.planner.activations import LayerExecution, Recomputation, backward_bytes, kept_bytes
from paceline.planner.model_shape import MemoryShape

NUM_TOKENS = 16_384


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("is_fused", [False, True], ids=["eager", "fused"])
@pytest.mark.parametrize("name", ["qwen3-1.7b", "llama3-8b"])
@pytest.mark.parametrize(
    "recompute",
    [
        Recomputation(),
        Recomputation("all"),
        Recomputation("every_k"),
        Recomputation("selective"),
        Recomputation("selective", keep="half_matmuls"),
        Recomputation("selective", keep="attention"),
    ],
    ids=str,
)
def test_the_peak_of_the_backward_pass_is_estimated_within_a_tenth(name, recompute, is_fused):
    config = shape_config(name)
    config.num_hidden_layers = 4
    settings = TrainSection(
        gradient_checkpointing=recompute.choice,
        checkpoint_every=recompute.every,
        selective_keep=recompute.keep,
    )
    kept, peak = layer_peaks(config, NUM_TOKENS, settings, is_fused)
    shape, how = (
        MemoryShape.from_hf_config(config.to_dict()),
        LayerExecution("fused" if is_fused else "eager"),
    )
    estimated = NUM_TOKENS * kept_bytes(shape, how, recompute)
    # neither the layers' own output nor the rotary factors are among what the layers keep
    assert estimated == pytest.approx(kept, rel=0.1, abs=NUM_TOKENS * (3 * config.hidden_size + 512))
    assert estimated + NUM_TOKENS * backward_bytes(shape, how, recompute) == pytest.approx(peak, rel=0.1)
