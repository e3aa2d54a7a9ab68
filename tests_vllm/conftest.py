"""Tests with a real vLLM, in a Python of its own; skipped where there is none.

`make test-vllm` makes that environment and runs these; `make test` does not collect this folder.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
for folder in ("model", "rollout"):
    sys.path.insert(0, str(ROOT / "tests" / folder))


def vllm_python() -> str | None:
    """The Python with vLLM: PACELINE_VLLM_PYTHON, or the environment that `make test-vllm` makes."""
    chosen = os.environ.get("PACELINE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if not Path(chosen).exists() or subprocess.run([chosen, "-c", code], check=False).returncode:
        return None
    return chosen


@pytest.fixture(scope="session")
def python() -> str:
    found = vllm_python()
    if found is None:
        pytest.skip("no Python with vLLM: make test-vllm, or PACELINE_VLLM_PYTHON")
    return found
