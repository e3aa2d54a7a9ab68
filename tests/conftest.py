"""Shared by all tests: tests/model is importable (tiny models), and the machine's cores are not oversubscribed."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "model"))
torch.set_num_threads(min(2, torch.get_num_threads()))
