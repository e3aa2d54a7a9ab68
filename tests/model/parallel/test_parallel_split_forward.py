"""Cases 20 and 25 across ranks: the split vocabulary and divided heads give the whole's values and gradients."""

import pytest
import torch
from rank_pool import RankPool
from split_forward import reference_head, split_head, ulysses_attention, whole_attention

from paceline.model.attention import AttentionArgs
from paceline.model.logprob_head import HeadSettings
from paceline.model.parallel.groups import Peers
from paceline.model.parallel.ulysses import slice_rows
from paceline.model.parallel.vocab_head import vocabulary_start


def assert_close_to_scale(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within float32 rounding of the largest terms, which cancel in the smaller entries."""
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("settings", "peak"),
    [
        (HeadSettings(1.0, None, 3), 1.0),
        (HeadSettings(0.5, 2.0, 64, with_entropy_grad=True), 1.0),
        # one token has all the mass, so every other part has none
        (HeadSettings(1.0, None, 2, with_entropy_grad=True), 60.0),
    ],
    ids=["plain", "capped, cold, entropy", "peaked"],
)
def test_a_split_vocabulary_gives_the_whole_one_s_values_and_gradients(
    settings: HeadSettings, peak: float, world_size: int, ranks: RankPool
):
    vocabulary, num_tokens = 29, 7  # 29 divides by neither 2 nor 4
    expected = reference_head(vocabulary, num_tokens, peak, settings)
    found = ranks.run(world_size, split_head, vocabulary, num_tokens, peak, settings)
    for result in found:
        for mine, wanted in zip(result["values"], expected["values"], strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-5, atol=1e-5)
        assert_close_to_scale(result["grads"][0], expected["grads"][0])
        assert result["entropy_has_graph"] == settings.with_entropy_grad
    for part in (1, 2):
        together = torch.cat([result["grads"][part] for result in found])
        assert_close_to_scale(together, expected["grads"][part])


def test_no_response_token_on_a_rank_is_no_error(ranks: RankPool):
    for result in ranks.run(2, split_head, 29, 0, 1.0, HeadSettings(1.0, None, 4)):
        assert len(result["values"][0]) == 0
        assert float(result["grads"][1].abs().sum()) == 0.0


def test_parts_of_the_vocabulary_start_where_chunks_do():
    starts = [vocabulary_start(29, Peers(4, index)) for index in range(4)]
    assert starts == [0, 8, 16, 24]
    assert [vocabulary_start(5, Peers(4, index)) for index in range(4)] == [0, 2, 4, 5]


@pytest.mark.parametrize("layout", ["shared", "alone", "padded"])
@pytest.mark.parametrize(
    ("heads", "world_size"), [((4, 4), 2), ((4, 2), 2), ((4, 2), 4), ((4, 1), 4), ((8, 4), 2)], ids=str
)
def test_attention_over_ranks_is_that_of_the_whole_row(
    heads: tuple[int, int], world_size: int, layout: str, ranks: RankPool
):
    for args in (AttentionArgs(0, 0.5, None, None), AttentionArgs(0, 0.5, 6, 5.0)):
        expected = whole_attention(heads, layout, args)
        found = ranks.run(world_size, ulysses_attention, heads, layout, args)
        for index, wanted in enumerate(expected):
            tokens = 1 if index == 0 else 2
            row = torch.cat([result[index] for result in found], dim=tokens)
            num_tokens = wanted.shape[tokens]
            torch.testing.assert_close(row.narrow(tokens, 0, num_tokens), wanted, rtol=1e-5, atol=1e-5)
            if index:  # padding is never attended to, so no gradient reaches it
                assert (
                    float(row.narrow(tokens, num_tokens, row.shape[tokens] - num_tokens).abs().sum()) == 0.0
                )


def test_labels_go_with_the_token_that_predicts_them():
    source_R = torch.tensor([3, 4, 2, 2, 7, 11])  # two rows of six; columns 3 4 2 2 1 5
    parts = [slice_rows(6, source_R, Peers(2, index)) for index in range(2)]
    assert [part.own_R.tolist() for part in parts] == [[2, 3, 4], [0, 1, 5]]
    # the first rank holds columns 0 to 2 of both rows: flattened 0 to 2, then 3 to 5
    assert parts[0].source_R.tolist() == [2, 2, 4]
    assert parts[1].source_R.tolist() == [0, 1, 5]
    with pytest.raises(ValueError, match="rows of 7 tokens"):
        slice_rows(7, source_R, Peers(2, 0))
