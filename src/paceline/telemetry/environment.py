"""What a run ran on, for `env.json`. Torch-free: what only torch knows is handed in by the caller."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from paceline.files import write_whole

RECORD_VERSION = 1
ENVIRONMENT_FILE = "env.json"

_PACKAGES = (
    *(
        "paceline",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "pydantic",
        "pyyaml",
        "pyarrow",
    ),
    *("psutil", "plotly", "reasoning-gym", "math-verify", "gguf", "accelerate", "triton", "flash-attn"),
    *("liger-kernel", "tensorboard", "wandb", "nvidia-ml-py"),
)
# settings that change speed or numerics; never a whole environment, which may hold secrets
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "KMP_AFFINITY",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
)
_GIT_TIMEOUT_S = 10.0


def collect_environment(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Everything about machine and software that explains a run's figures, ready for JSON.

    `extra` is what the caller detected: `device` (name, count, memory), `features` (back ends found or missing) and
    the like; its keys stand beside those collected here.

    Raises:
        ValueError: a key of `extra` is one collected here.
    """
    collected = {
        "v": RECORD_VERSION,
        "unix_s": time.time(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": {
            "model": cpu_model(),
            "num_cores": os.cpu_count(),
            "num_usable_cores": _num_usable_cores(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "packages": package_versions(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "git": source_revision(Path(__file__).resolve().parent.parent),
    }
    if clashing := sorted(set(extra) & set(collected)):
        raise ValueError(f"env.json collects {', '.join(clashing)} itself; name the extra entries otherwise")
    return collected | dict(extra)


def write_environment(run_dir: Path, environment: Mapping[str, Any]) -> Path:
    """Writes `env.json` into the run's folder; a resumed run replaces it with what it runs on now.

    Raises:
        TypeError: a value has no JSON form.
    """
    text = json.dumps(environment, indent=2)
    path = run_dir / ENVIRONMENT_FILE
    write_whole(path, text + "\n")
    return path


def package_versions() -> dict[str, str]:
    """Installed versions of the packages a run's speed or numbers can depend on; absent ones are left out."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cpu_model() -> str:
    """The processor's name as the system gives it; "unknown" where it gives none."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"


def source_revision(package_dir: Path) -> dict[str, Any] | None:
    """Commit of the checkout that `package_dir` is the source of, and whether files differ from it.

    None when the package is installed rather than run from its checkout (also where that installation lies inside
    some other project's checkout), or git is missing or silent.
    """
    top = _git(package_dir, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / package_dir.name != package_dir:
        return None
    revision = _git(package_dir, "rev-parse", "HEAD")
    changes = _git(package_dir, "status", "--porcelain", "--untracked-files=no")
    if revision is None or changes is None:
        return None
    return {"revision": revision, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, no answer: the revision is unknown
        return None
    return done.stdout.strip()


def _num_usable_cores() -> int | None:
    """Cores this process may run on, where the system tells."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
