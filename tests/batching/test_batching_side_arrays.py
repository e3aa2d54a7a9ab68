"""Case 22: what lies beside the tokens is padded with them, from lengths and never from token values."""

import numpy as np
import pytest

from paceline.batching.side_arrays import SideArray, pad_side_arrays

EOS = 2


def beside_tokens(lengths, top_k=2):
    """Tokens, labels, loss mask, an image mask and top-k log-probs of samples, each with its own pad value."""
    generator = np.random.default_rng(0)
    ids = [generator.integers(3, 9, length) for length in lengths]
    return {
        "input_ids": SideArray(ids, EOS, np.int64),
        "labels": SideArray([[*row[1:], EOS] for row in ids], -100, np.int64),
        "loss_mask": SideArray([np.ones(n, bool) for n in lengths], False, np.bool_),
        "image_mask": SideArray([np.arange(n) % 2 for n in lengths], 0, np.int8),
        "top_k_logprobs": SideArray(
            [generator.normal(size=(n, top_k)) for n in lengths], -np.inf, np.float32, (top_k,)
        ),
    }


@pytest.mark.parametrize("lengths", [[3, 5, 1], [4], []])
@pytest.mark.parametrize("num_rows", [None, 4])
def test_every_array_gets_the_same_rows_and_width_and_its_own_pad_value(lengths, num_rows):
    arrays = beside_tokens(lengths)
    padded = pad_side_arrays(arrays, 6, num_rows)
    num_laid_out = len(lengths) if num_rows is None else num_rows
    for name, array in arrays.items():
        found = padded[name]
        assert found.shape == (num_laid_out, 6, *array.trailing)
        assert found.dtype == np.dtype(array.dtype)
        for row, values in enumerate(array.values):
            np.testing.assert_array_equal(found[row, : lengths[row]], np.asarray(values).astype(array.dtype))
            assert (found[row, lengths[row] :] == array.pad_value).all()
        assert (found[len(lengths) :] == array.pad_value).all()


def test_a_mask_follows_the_length_even_where_the_padding_token_is_the_end_token():
    padded = pad_side_arrays(
        {
            "input_ids": SideArray([[5, 6, EOS]], EOS, np.int64),
            "loss_mask": SideArray([[True, True, True]], False, np.bool_),
        },
        5,
    )
    assert padded["input_ids"].tolist() == [[5, 6, EOS, EOS, EOS]]
    assert padded["loss_mask"].tolist() == [[True, True, True, False, False]]


def test_arrays_of_different_lengths_are_refused():
    arrays = {
        "input_ids": SideArray([[1, 2], [3]], 0, np.int64),
        "labels": SideArray([[2], [3]], -100, np.int64),
    }
    with pytest.raises(ValueError, match=r"labels has lengths \[1, 1\].* \[2, 1\]"):
        pad_side_arrays(arrays, 4)


@pytest.mark.parametrize(
    ("array", "width", "num_rows", "message"),
    [
        (SideArray([[1, 2, 3]], 0, np.int64), 2, None, "3 tokens does not fit the padded width of 2"),
        (SideArray([[1], [2]], 0, np.int64), 2, 1, "2 samples, more than 1 rows"),
        (SideArray([[1]], -1, np.uint8), 2, None, "-1 is no value of uint8"),
        (SideArray([[1]], 0.5, np.int64), 2, None, "0.5 is no value of int64"),
        (SideArray([[0.5]], 0, np.int64), 2, None, "sample 0 is float64"),
        (SideArray([np.zeros((1, 3))], 0, np.float32, (2,)), 2, None, r"\[length, \*\(3,\)\]"),
    ],
)
def test_what_would_be_cut_or_changed_is_refused_by_name(array, width, num_rows, message):
    with pytest.raises(ValueError, match=f"labels.*{message}"):
        pad_side_arrays({"labels": array}, width, num_rows)
