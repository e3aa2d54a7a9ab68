"""Whether Triton is there. Builds of torch for CPUs come without it."""

import importlib.util


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
