"""The objective of an update does not depend on how it is split; its parts and its metrics."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from algorithm_cases import settings_of, single_sample, tokens
from torch import Tensor

from paceline.algorithms.denominators import Denominator, aggregation_weights
from paceline.algorithms.losses import LossInputs
from paceline.algorithms.objective import ObjectiveOutput, policy_objective
from paceline.config.schema import Aggregation, AlgorithmSection

NUM_TOKENS = (3, 1, 6, 2, 5, 4, 4, 7)
MASKED = {(2, 0), (2, 5), (5, 1), *((6, position) for position in range(4))}  # sample 6 has no loss token
VOCABULARY = 5


@dataclass(frozen=True)
class Update:
    """A mini-batch of eight samples, and a policy: one row of logits per position."""

    logits_PV: Tensor
    targets: list[Tensor]
    old: list[Tensor]
    reference: list[Tensor]
    advantages: list[Tensor]
    masks: list[Tensor]

    @property
    def denominator(self) -> Denominator:
        """Counts over all eight."""
        lengths = [int(mask.sum()) for mask in self.masks if mask.sum()]
        return Denominator(sum(lengths), len(lengths), 2, 8)


def make_update() -> Update:
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits_PV = noise(max(NUM_TOKENS), VOCABULARY).requires_grad_()
    targets = [torch.randint(VOCABULARY, (length,), generator=generator) for length in NUM_TOKENS]
    current = [
        logits_PV.detach().log_softmax(-1)[: len(t)].gather(-1, t[:, None]).squeeze(-1) for t in targets
    ]
    return Update(
        logits_PV,
        targets,
        old=[logprob_L + 0.4 * noise(len(logprob_L)) for logprob_L in current],
        reference=[logprob_L + noise(len(logprob_L)) for logprob_L in current],
        advantages=[noise(1).expand(length) for length in NUM_TOKENS],
        masks=[
            torch.tensor([float((i, p) not in MASKED) for p in range(length)], dtype=torch.float64)
            for i, length in enumerate(NUM_TOKENS)
        ],
    )


def output_of(update: Update, members: list[int], settings: AlgorithmSection) -> ObjectiveOutput:
    """The objective of one micro-batch."""
    log_p_PV = update.logits_PV.log_softmax(-1)
    entropy_P = -(log_p_PV.exp() * log_p_PV).sum(-1)
    targets = [update.targets[i] for i in members]
    logprob_T = torch.cat([log_p_PV[: len(t)].gather(-1, t[:, None]).squeeze(-1) for t in targets])
    entropy_T = torch.cat([entropy_P[: len(t)] for t in targets])
    mask_T = torch.cat([update.masks[i] for i in members])
    index_T = torch.arange(len(members)).repeat_interleave(torch.tensor([len(t) for t in targets]))
    lengths_N = torch.stack([update.masks[i].sum() for i in members])
    assert settings.aggregation is not None
    inputs = LossInputs(
        logprob_T=logprob_T,
        old_logprob_T=torch.cat([update.old[i] for i in members]),
        advantage_T=torch.cat([update.advantages[i] for i in members]),
        weight_T=aggregation_weights(settings.aggregation, index_T, mask_T, lengths_N, update.denominator),
        loss_mask_T=mask_T,
        sample_index_T=index_T,
        num_samples=len(members),
    )
    reference_T = torch.cat([update.reference[i] for i in members])
    return policy_objective(inputs, entropy_T, reference_T, settings)


def micro_batches(num_ranks: int, size: int) -> Iterator[list[int]]:
    """All micro-batches of all ranks: ranks take samples in turn."""
    for rank in range(num_ranks):
        mine = list(range(rank, len(NUM_TOKENS), num_ranks))
        yield from (mine[start : start + size] for start in range(0, len(mine), size))


def in_parts(
    update: Update, settings: AlgorithmSection, parts: list[list[int]]
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and reduced metrics of an update made of these micro-batches."""
    update.logits_PV.grad = None
    loss, totals, weights = 0.0, dict[str, float](), dict[str, float]()
    for members in parts:
        output = output_of(update, members, settings)
        output.loss.backward()  # gradients add up over micro-batches as a sum over ranks would
        loss += output.loss.item()
        for name, (value, weight) in output.metrics.items():
            if name == "ratio/max":
                totals[name] = max(totals.get(name, 0.0), value)
                weights[name] = 1.0
            else:
                totals[name] = totals.get(name, 0.0) + value * weight
                weights[name] = 1.0 if name.startswith("loss/") else weights.get(name, 0.0) + weight
    assert update.logits_PV.grad is not None
    return loss, update.logits_PV.grad.clone(), {name: totals[name] / weights[name] for name in totals}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(
    name: str, aggregation: Aggregation, num_ranks: int, size: int
) -> None:
    update = make_update()
    settings = settings_of(
        name,
        aggregation=aggregation,
        clip_low=0.2,
        clip_high=0.28,
        kl_coefficient=0.05,
        entropy_coefficient=0.01,
    )
    whole = in_parts(update, settings, [list(range(len(NUM_TOKENS)))])
    split = in_parts(update, settings, list(micro_batches(num_ranks, size)))
    assert split[0] == pytest.approx(whole[0], rel=1e-9)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-9, atol=1e-12)
    assert split[2] == pytest.approx(whole[2], rel=1e-9)
    assert whole[1].abs().max() > 1e-4 and 0.0 < whole[2]["clip_fraction"] < 1.0


def test_the_loss_metrics_add_up_to_the_loss() -> None:
    output = output_of(make_update(), [0, 1, 2], settings_of(kl_coefficient=0.05, entropy_coefficient=0.01))
    parts = {name: value for name, (value, _) in output.metrics.items() if name.startswith("loss/")}
    assert set(parts) == {"loss/total", "loss/policy", "loss/kl", "loss/entropy"}
    assert parts["loss/total"] == pytest.approx(output.loss.item())
    assert parts["loss/total"] == pytest.approx(
        parts["loss/policy"] + parts["loss/kl"] + parts["loss/entropy"]
    )
    assert parts["loss/kl"] > 0.0 > parts["loss/entropy"]


def test_means_are_over_loss_tokens_and_weighted_by_their_number() -> None:
    update = make_update()
    output = output_of(update, [2, 6], settings_of())
    assert {weight for name, (_, weight) in output.metrics.items() if not name.startswith("loss/")} == {4.0}
    log_ratio_L = _logprobs(update, 2) - update.old[2]
    kept_L = log_ratio_L[update.masks[2] > 0]
    assert output.metrics["ratio/mean"][0] == pytest.approx(kept_L.exp().mean().item())
    assert output.metrics["ratio/max"][0] == pytest.approx(kept_L.exp().max().item())
    assert output.metrics["kl/old"][0] == pytest.approx((kept_L.exp() - 1 - kept_L).mean().item())


def _logprobs(update: Update, index: int) -> Tensor:
    targets_L = update.targets[index]
    log_p_PV = update.logits_PV.detach().log_softmax(-1)
    return log_p_PV[: len(targets_L)].gather(-1, targets_L[:, None]).squeeze(-1)


def test_a_kl_in_the_reward_is_measured_but_not_in_the_loss() -> None:
    inputs = single_sample(tokens(-1.0, -2.0, grad=True), tokens(-1.0, -2.0), tokens(1.0, 1.0))
    reference_T, entropy_T = tokens(-1.5, -2.0), tokens(0.5, 1.5)
    settings = settings_of(kl_coefficient=0.5, kl_placement="reward", kl_estimator="k1")
    output = policy_objective(inputs, entropy_T, reference_T, settings)
    assert output.loss.item() == pytest.approx(-2.0) and "loss/kl" not in output.metrics
    assert output.metrics["kl/reference"] == pytest.approx((0.25, 2.0))
    assert output.metrics["kl/capped_fraction"] == (0.0, 2.0)
    assert output.metrics["entropy"] == pytest.approx((1.0, 2.0))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_tokens_whose_kl_stands_at_the_cap_are_counted(estimator: str) -> None:
    inputs = single_sample(tokens(*[-1.0] * 4), tokens(*[-1.0] * 4), tokens(*[1.0] * 4))
    settings = settings_of(kl_coefficient=0.1, kl_estimator=estimator)
    output = policy_objective(inputs, tokens(*[0.0] * 4), tokens(-1.0, -1.5, -101.0, 99.0), settings)
    assert output.metrics["kl/capped_fraction"] == (0.5, 4.0)


def test_a_kl_in_the_loss_without_a_reference_is_refused() -> None:
    inputs = single_sample(tokens(-1.0), tokens(-1.0), tokens(1.0))
    with pytest.raises(ValueError, match=r"algorithm\.kl_coefficient"):
        policy_objective(inputs, tokens(0.0), None, settings_of(kl_coefficient=0.5))


def test_settings_without_a_preset_are_refused() -> None:
    inputs = single_sample(tokens(-1.0), tokens(-1.0), tokens(1.0))
    with pytest.raises(ValueError, match=r"algorithm\.loss"):
        policy_objective(inputs, tokens(0.0), None, AlgorithmSection())


def test_the_entropy_bonus_raises_entropy() -> None:
    logprob_T, entropy_T = tokens(-1.0, grad=True), tokens(0.7, grad=True)
    inputs = single_sample(logprob_T, tokens(-1.0), tokens(0.0))
    policy_objective(inputs, entropy_T, None, settings_of(entropy_coefficient=0.1)).loss.backward()
    assert entropy_T.grad is not None and entropy_T.grad.item() == pytest.approx(-0.1)


def test_without_a_coefficient_the_entropy_gets_no_gradient() -> None:
    entropy_T = tokens(0.7, grad=True)
    inputs = single_sample(tokens(-1.0, grad=True), tokens(-1.0), tokens(1.0))
    policy_objective(inputs, entropy_T, None, settings_of()).loss.backward()
    assert entropy_T.grad is None


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("junk", [-math.inf, math.inf, math.nan, 1e30])
def test_what_stands_at_a_masked_token_has_no_influence(name: str, junk: float) -> None:
    def gradient_with(value: float) -> tuple[float, Tensor, dict[str, tuple[float, float]]]:
        logprob_T = tokens(-1.0, value, -0.5, grad=True)
        mask_T = tokens(1.0, 0.0, 1.0)
        inputs = LossInputs(
            logprob_T,
            tokens(-1.1, value, -0.4),
            tokens(1.0, 0.0, 1.0),
            mask_T / 2,
            mask_T,
            torch.zeros(3).long(),
            1,
        )
        settings = settings_of(name, kl_coefficient=0.1, entropy_coefficient=0.1)
        output = policy_objective(inputs, tokens(0.5, value, 0.5), tokens(-2.0, value, -2.0), settings)
        output.loss.backward()
        assert logprob_T.grad is not None
        return output.loss.item(), logprob_T.grad, output.metrics

    loss, gradient_T, metrics = gradient_with(junk)
    clean_loss, clean_T, clean_metrics = gradient_with(0.0)
    assert loss == clean_loss and torch.equal(gradient_T, clean_T) and metrics == clean_metrics


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_a_micro_batch_without_tokens_stays_in_the_graph_and_adds_zero(name: str) -> None:
    logits_T = tokens(1.0, 2.0, grad=True)
    inputs = single_sample(logits_T[:0], tokens(), tokens())
    output = policy_objective(inputs, tokens(), None, settings_of(name))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert logits_T.grad is not None and torch.equal(logits_T.grad, tokens(0.0, 0.0))
    assert set(output.metrics) == {"loss/total", "loss/policy"}
