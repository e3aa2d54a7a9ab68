"""Shared by all tests: helpers of some folders are importable, and the machine's cores are not oversubscribed."""

import os
import signal
import sys

# a shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# files run side by side (pytest-xdist), and tests start processes: spinning threads would take each other's core
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "reward_models"))
sys.path.insert(0, str(Path(__file__).parent / "data"))
sys.path.insert(0, str(Path(__file__).parent / "model"))
sys.path.insert(0, str(Path(__file__).parent / "explanation"))
from rank_pool import RankPool

settings.register_profile("shared-cores", deadline=None)  # a busy machine is not a failing example
settings.load_profile("shared-cores")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Rank processes for a module's tests: starting them costs more than most of these tests.

    Not for the session: gloo's threads poll, and outlive the groups of every mesh that a test has made.
    """
    pool = RankPool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that need a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    here = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
    items[:] = here
