"""Everything that lies beside the tokens of a padded micro-batch, padded by one function to one shape.

Labels, loss masks, masks of image tokens, top-k ids and log-probs: what is cut, aligned or padded differently from the
tokens it belongs to is wrong in silence, so nobody pads on their own.

Shapes: B rows, T tokens of a row, `...` trailing dimensions such as the k of a top-k.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SideArray:
    """One array per sample, [length, ...], and what stands where there is no token.

    `dtype` and `trailing` (the dimensions after the length) are stated, not read from the samples: a rank without
    samples lays out the same type and shape as its peers.
    """

    values: Sequence[Array | Sequence[int] | Sequence[float]]
    pad_value: float
    dtype: npt.DTypeLike
    trailing: tuple[int, ...] = ()


def pad_side_arrays(
    arrays: Mapping[str, SideArray], width: int, num_rows: int | None = None
) -> dict[str, Array]:
    """Every array as [B, T, ...], filled on the right, and in rows without a sample, with its pad value.

    `width` is T; `num_rows` is B, by default the number of samples. Order of rows is that of the samples.

    Raises:
        ValueError: arrays disagree on how many samples there are or how long one is; a sample does not fit `width`, or
            the samples do not fit `num_rows`; trailing dimensions differ from those stated; or the pad value is not one
            of the dtype.
    """
    lengths: list[int] | None = None
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        rows = [np.asarray(values) for values in array.values]
        own = [len(row) for row in rows]
        if lengths is not None and own != lengths:
            raise ValueError(f"{name} has lengths {own}, and the arrays before it have {lengths}")
        lengths = own
        found[name] = _pad(name, array, rows, width, len(rows) if num_rows is None else num_rows)
    return found


def _pad(name: str, array: SideArray, rows: Sequence[Array], width: int, num_rows: int) -> Array:
    if len(rows) > num_rows:
        raise ValueError(f"{name} has {len(rows)} samples, more than {num_rows} rows")
    padded = np.full((num_rows, width, *array.trailing), _fill(name, array))
    for index, row in enumerate(rows):
        if len(row) > width:
            raise ValueError(
                f"{name}: a sample of {len(row)} tokens does not fit the padded width of {width}"
            )
        if not len(row):
            continue
        if row.shape[1:] != array.trailing or not np.can_cast(row.dtype, padded.dtype, "same_kind"):
            raise ValueError(
                f"{name}: sample {index} is {row.dtype} [length, *{row.shape[1:]}], "
                f"not {padded.dtype} [length, *{array.trailing}]"
            )
        padded[index, : len(row)] = row
    return padded


def _fill(name: str, array: SideArray) -> Array:
    """The pad value in the array's dtype, which must be able to hold it: -1 in an unsigned type would become 255."""
    with np.errstate(invalid="ignore"):
        fill: Array = np.asarray(array.pad_value).astype(array.dtype)
    if fill.dtype.kind in "bui" and fill != array.pad_value:
        raise ValueError(f"{name}: {array.pad_value} is no value of {fill.dtype}")
    return fill
