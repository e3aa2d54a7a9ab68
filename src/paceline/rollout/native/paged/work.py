"""FLOPs of rounds, by the convention of telemetry/flops.py, without a loop over rows."""

import numpy as np

from paceline.rollout.native.paged.batches import IntArray, PrefillBatch
from paceline.telemetry.flops import ModelShape, forward_flops


def decode_flops(shape: ModelShape, positions_R: IntArray) -> float:
    """One token for each of R samples, after `positions_R` tokens; equals `forward_flops` of segments (1, position)."""
    num_rows = len(positions_R)
    pairs = (shape.num_layers - shape.num_windowed_layers) * float(positions_R.sum() + num_rows / 2)
    if shape.num_windowed_layers:
        seen = np.minimum(positions_R + 0.5, shape.sliding_window)
        pairs += shape.num_windowed_layers * float(seen.sum())
    matmul = 2.0 * num_rows * (shape.body_parameters + shape.head_parameters)
    return matmul + 4.0 * shape.num_heads * shape.head_dim * pairs


def prefill_flops(shape: ModelShape, batch: PrefillBatch) -> float:
    """The chunks of a row and the head for what is drawn from it."""
    segments = [(chunk.length, chunk.start) for chunk in batch.chunks]
    return forward_flops(shape, segments, len(batch.sources_R))
