"""Case 22: masks come from lengths, never from token values."""

import pytest
import torch
from tiny_models import tiny_model

from paceline.model.inputs import padded_inputs, score
from paceline.model.logprob_head import HeadSettings
from paceline.rollout.native.scheduler import RunningSample
from paceline.rollout.protocol import SamplingParams

PARAMS = SamplingParams(1.0, frozenset({2}))


@pytest.mark.parametrize(("drawn", "reason"), [([5, 6, 2], "stop"), ([5, 6, 7], "length"), ([2], "stop")])
def test_the_end_token_is_trained_and_nothing_after_it_exists(drawn, reason):
    sample = RunningSample(0, 0, 0, max_new_tokens=3, next_position=4)
    reasons = [sample.append(token, -1.0, PARAMS) for token in drawn]
    assert reasons[:-1] == [None] * (len(drawn) - 1) and reasons[-1] == reason
    assert sample.tokens == drawn


def test_padding_that_equals_a_real_token_changes_no_logprob():
    model = tiny_model()
    settings = HeadSettings(1.0, None, 8)
    pair = ((0, 2, 10), (5, 6, 2))  # the padding id and the end id stand inside the sequence as well
    exact, _ = score(model, padded_inputs([pair], 6, model.device), settings)
    wide, _ = score(model, padded_inputs([pair], 11, model.device), settings)
    torch.testing.assert_close(wide, exact, rtol=1e-5, atol=1e-5)
    assert len(wide) == 3
