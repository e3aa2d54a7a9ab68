"""Case 20 and case 21: chunks change nothing, entropy needs the whole row, temperature on both sides."""

import math

import pytest
import torch

from paceline.model.logprob_head import HeadSettings, full_logprobs, response_logprobs, scaled_logits


def _random(num_tokens: int = 13, vocabulary: int = 31, hidden: int = 8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden_RE = torch.randn(num_tokens, hidden, generator=generator, dtype=dtype, requires_grad=True)
    weight_VE = torch.randn(vocabulary, hidden, generator=generator, dtype=dtype, requires_grad=True)
    bias_V = torch.randn(vocabulary, generator=generator, dtype=dtype, requires_grad=True)
    targets_R = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    return hidden_RE, weight_VE, bias_V, targets_R


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
def test_entropy_of_uniform_logits_is_log_of_the_vocabulary_for_every_chunk(chunk):
    hidden, weight = torch.zeros(5, 3), torch.randn(4, 3)
    _, entropy = response_logprobs(
        hidden, weight, None, torch.zeros(5, dtype=torch.long), HeadSettings(1.0, None, chunk)
    )
    torch.testing.assert_close(entropy, torch.full((5,), math.log(4)))


@pytest.mark.parametrize("chunk", [1, 2, 5, 13, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_values_and_gradients_equal_the_full_softmax(chunk, temperature, softcap, with_bias):
    hidden, weight, bias, targets = _random()
    bias = bias if with_bias else None
    settings = HeadSettings(temperature, softcap, chunk, with_entropy_grad=True)
    weights = torch.randn(2, len(targets), generator=torch.Generator().manual_seed(1))
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    found, gradients = [], []
    for function in (response_logprobs, full_logprobs):
        logprob, entropy = function(hidden, weight, bias, targets, settings)
        found.append((logprob.detach(), entropy.detach()))
        objective = (weights[0] * logprob).sum() + (weights[1] * entropy).sum()
        gradients.append(torch.autograd.grad(objective, inputs))
    # logits are float32 by contract, so that is the precision of the comparison
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_no_entropy_graph_is_kept_without_a_coefficient():
    hidden, weight, _, targets = _random(dtype=torch.float32)
    logprob, entropy = response_logprobs(hidden, weight, None, targets, HeadSettings(1.0, None, 4))
    assert logprob.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_below_one_token_is_refused(chunk):
    with pytest.raises(ValueError, match="at least 1"):
        HeadSettings(1.0, None, chunk)


def test_temperature_zero_cannot_be_scored():
    with pytest.raises(ValueError, match="positive"):
        HeadSettings(0.0, None, 4)


def test_scoring_uses_the_temperature_that_was_sampled_with():
    weight = torch.eye(2)
    hidden = torch.tensor([[2.0, 0.0]]).repeat(2, 1)
    logprob, _ = response_logprobs(hidden, weight, None, torch.tensor([0, 1]), HeadSettings(0.5, None, 4))
    torch.testing.assert_close(logprob, torch.tensor([-0.018150, -4.018150]), rtol=1e-4, atol=1e-6)
    at_one, _ = response_logprobs(hidden, weight, None, torch.tensor([0, 1]), HeadSettings(1.0, None, 4))
    torch.testing.assert_close(
        (logprob - at_one).exp().reciprocal(), torch.tensor([0.897, 6.627]), rtol=1e-3, atol=1e-3
    )


def test_zero_response_tokens_give_empty_results_and_zero_gradients():
    hidden, weight, _, _ = _random(dtype=torch.float32)
    empty = torch.zeros(0, dtype=torch.long)
    logprob, entropy = response_logprobs(hidden[:0], weight, None, empty, HeadSettings(1.0, None, 4))
    logprob.sum().backward()
    assert len(logprob) == len(entropy) == 0
    assert torch.count_nonzero(weight.grad) == 0


def _peak_of_tensors(chunk: int) -> int:
    """Largest single allocation, in elements, while the head runs forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (4096,):
                    self.largest = max(self.largest, tensor.numel())
            return out

    hidden = torch.randn(64, 2, requires_grad=True)
    weight = torch.randn(4096, 2, requires_grad=True)
    with Watch() as watch:
        logprob, _ = response_logprobs(
            hidden, weight, None, torch.zeros(64, dtype=torch.long), HeadSettings(1.0, None, chunk)
        )
        logprob.sum().backward()
    return watch.largest


def test_no_tensor_is_larger_than_chunk_times_vocabulary():
    assert [_peak_of_tensors(chunk) // 4096 for chunk in (4, 8, 16, 64)] == [4, 8, 16, 64]


def test_logits_are_float32_whatever_the_weights_are():
    assert (
        scaled_logits(
            torch.randn(2, 4).bfloat16(), torch.randn(5, 4).bfloat16(), None, HeadSettings(1.0, None, 1)
        ).dtype
        == torch.float32
    )
