"""Head and loss in one pass equal the chunked head followed by the loss, gradients included."""

import pytest
import torch
from torch import Tensor

from paceline.model.fused.head import chunks_of_samples, head_loss
from paceline.model.logit_kernels import ReferenceLogitKernels
from paceline.model.logprob_head import HeadSettings, full_logprobs

SIZES = [5, 3, 9, 1, 6]


def loss_of_samples(rows: slice, logprob: Tensor, entropy: Tensor) -> Tensor:
    """A sequence-level ratio per sample, as GSPO has it, plus an entropy term: nothing crosses samples."""
    loss = logprob.new_zeros(())
    start = 0
    for number, size in enumerate(SIZES):
        end = start + size
        if rows.start <= start and end <= rows.stop:
            own = slice(start - rows.start, end - rows.start)
            loss = loss - (number - 2.0) * torch.exp(0.1 * logprob[own].mean()) - 0.2 * entropy[own].sum()
        start = end
    return loss


@pytest.mark.parametrize("limit", [1, 8, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_pass_gives_the_loss_and_gradients_of_two(limit: int, temperature: float) -> None:
    torch.manual_seed(0)
    num_tokens = sum(SIZES)
    hidden = torch.randn(num_tokens, 16, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(53, 16, requires_grad=True)
    targets = torch.randint(0, 53, (num_tokens,))
    settings = HeadSettings(temperature, None, chunk=4)
    logprob, entropy = full_logprobs(hidden, weight, None, targets, settings)
    expected = loss_of_samples(slice(0, num_tokens), logprob, entropy)
    expected_grads = torch.autograd.grad(2.0 * expected, (hidden, weight))
    loss = head_loss(
        hidden,
        weight,
        targets,
        settings,
        chunks_of_samples(SIZES, limit),
        loss_of_samples,
        ReferenceLogitKernels(),
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for found, theirs in zip(torch.autograd.grad(2.0 * loss, (hidden, weight)), expected_grads, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


def test_chunks_hold_whole_samples_and_cover_every_row() -> None:
    assert chunks_of_samples(SIZES, 8) == [slice(0, 8), slice(8, 17), slice(17, 24)]
    assert chunks_of_samples([], 8) == []


def test_a_capped_head_is_refused() -> None:
    with pytest.raises(ValueError, match="capped"):
        head_loss(
            torch.zeros(1, 2),
            torch.zeros(3, 2),
            torch.zeros(1, dtype=torch.int64),
            HeadSettings(1.0, 5.0, 4),
            [slice(0, 1)],
            lambda rows, logprob, entropy: logprob.sum(),
            ReferenceLogitKernels(),
        )
