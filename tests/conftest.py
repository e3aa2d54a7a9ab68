"""Shared by all tests: tests/model is importable (tiny models), and the machine's cores are not oversubscribed."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "model"))
settings.register_profile("shared-cores", deadline=None)  # a busy machine is not a failing example
settings.load_profile("shared-cores")
torch.set_num_threads(min(2, torch.get_num_threads()))
