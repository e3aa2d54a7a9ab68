"""Bytes that work has to move at least, by one stated convention; a stage's GB/s rest on it. Torch-free.

Counted: a forward pass reads every weight a token passes through once, and reads the keys and values of earlier tokens;
keys and values of new tokens are written. A backward pass reads the weights again and reads and writes their gradients.
The optimiser reads and writes a master and two moments (float32), reads the gradient and writes the weight. Activations
are left out, because kernels decide how many of them ever reach memory: what is counted is a lower bound, and so are
the GB/s that follow from it.
"""

from collections.abc import Iterable

from paceline.telemetry.flops import ModelShape, Segment

_FORWARD_BACKWARD_WEIGHTS = 4  # read, read again, gradient read and written
_MASTER_AND_MOMENTS = 2 * 3 * 4


def weight_bytes(shape: ModelShape, bytes_per_value: int) -> int:
    """Weights that a pass reads; of a mixture of experts, those of one token."""
    return (shape.body_parameters + shape.head_parameters) * bytes_per_value


def kv_bytes_per_token(shape: ModelShape, bytes_per_value: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * bytes_per_value


def pass_bytes(
    shape: ModelShape, segments: Iterable[Segment], bytes_per_value: int, *, is_training: bool
) -> int:
    """One pass over a micro-batch."""
    weights = weight_bytes(shape, bytes_per_value) * (_FORWARD_BACKWARD_WEIGHTS if is_training else 1)
    num_tokens = sum(length + before for length, before in segments)
    return weights + num_tokens * kv_bytes_per_token(shape, bytes_per_value)


def rollout_bytes(
    shape: ModelShape,
    lengths: Iterable[tuple[int, int]],
    num_passes: int,
    bytes_per_value: int,
) -> int:
    """A rollout of samples of (prompt tokens, response tokens) in `num_passes` passes over the weights.

    Every response token but the first reads the keys and values of all tokens before it; those of every token are
    written once, a prompt's for each of its samples.
    """
    num_read = num_written = 0
    for prompt, response in lengths:
        num_decoded = max(0, response - 1)
        num_read += num_decoded * prompt + num_decoded * (num_decoded + 1) // 2
        num_written += prompt + num_decoded
    tokens = num_read + num_written
    return num_passes * weight_bytes(shape, bytes_per_value) + tokens * kv_bytes_per_token(
        shape, bytes_per_value
    )


def optimizer_bytes(num_parameters: int, bytes_per_value: int) -> int:
    """One step of AdamW with float32 masters over this rank's part of the parameters."""
    return num_parameters * (_MASTER_AND_MOMENTS + 2 * bytes_per_value)
