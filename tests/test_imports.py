"""The import table of docs/architecture.md, read from the source; and the packages that must not bring torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paceline"
DOCUMENT = SOURCE.parent.parent / "docs" / "architecture.md"

# what all may import
COMMON = {"types", "files"}

# may import, beside those and itself
TABLE: dict[str, set[str]] = {
    "types": set(),
    "files": set(),
    "config": set(),
    "telemetry": {"config"},
    "data": {"config"},
    "rewards": {"config"},
    "algorithms": {"config"},
    "batching": {"config"},
    "model": {"config", "telemetry", "batching"},
    "engine": {"config", "telemetry", "algorithms", "batching", "model"},
    "rollout": {"config", "telemetry", "model", "batching", "sync"},
    "reward_models": {"config", "telemetry", "data", "batching", "model", "engine", "rewards", "rollout"},
    "queue": {"config", "telemetry"},
    "serve": {"config", "telemetry", "data", "model", "rollout"},
    "sync": {"config", "telemetry"},
    "checkpoint": {"config", "telemetry"},
    "launch": {"config"},
    "diagnosis": {"config", "telemetry"},
    "explanation": {"config", "telemetry", "diagnosis"},
    "monitor": {"config", "telemetry"},
    "planner": {"config", "telemetry", "diagnosis"},
    "lab": {"config", "telemetry", "diagnosis", "planner"},
    "report": {"config", "telemetry", "diagnosis", "planner", "lab"},
    "adapters": {"config", "telemetry"},
}
TABLE["agents"] = {"config", "telemetry", "data", "rewards", "model", "rollout", "serve"}
TABLE["schedules"] = set(TABLE) - {"report", "diagnosis", "explanation", "lab", "adapters"}

# the package's own modules, commands and what shows it off stand above the table
CONSUMERS = {"", "cli", "demo", "bench"}

TORCH_FREE_FOLDERS = {
    "types",
    "files",
    "config",
    "batching",
    "diagnosis",
    "planner",
    "lab",
    "report",
    "adapters",
    "monitor",
    "explanation",
}
TORCH_FREE_MODULES = [
    "paceline",
    "paceline.cli",
    "paceline.launch",
    "paceline.telemetry",
    "paceline.rewards",
    "paceline.data.seeds",
]

FILES = sorted(SOURCE.rglob("*.py"))


def folder_of(path: Path) -> str:
    """Top folder under src/paceline, or "" for a module that lies in it directly."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever in it the import stands."""
    found: set[str] = set()
    package = ["paceline", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "paceline" else {base}
    return found


def imported_folders(path: Path) -> set[str]:
    """Folders of paceline a file imports from; "" stands for the package itself."""
    parts = [name.split(".") for name in imported_modules(path)]
    return {part[1] if len(part) > 1 else "" for part in parts if part[0] == "paceline"}


def test_the_documented_table_is_this_one() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {folder: set(re.findall(r"\w+", allowed)) for folder, allowed in rows}
    assert documented.pop("cli") == {"all"}
    assert documented.pop("schedules") == {"all", "above"}
    assert documented == {folder: TABLE[folder] for folder in documented}


def test_every_folder_has_a_row_in_the_table() -> None:
    assert {folder_of(path) for path in FILES} - CONSUMERS <= set(TABLE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_what_its_folder_may(path: Path) -> None:
    folder = folder_of(path)
    if folder in CONSUMERS:
        return
    forbidden = imported_folders(path) - {folder} - COMMON - TABLE[folder]
    assert not forbidden, f"{folder}/ may not import {sorted(forbidden)}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if folder_of(p) != "cli"], ids=lambda path: str(path.relative_to(SOURCE))
)
def test_imports_stand_at_the_top(path: Path) -> None:
    if path.relative_to(SOURCE) == Path("api.py"):
        return  # `import paceline` must not bring torch, so its functions import what they start
    if path.relative_to(SOURCE) == Path("demo/__main__.py"):
        return  # torch takes seconds to import, and a person must see something before
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = [
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert not hidden, f"imports inside functions at lines {hidden}"


def test_the_table_has_no_cycle() -> None:
    remaining = {folder: set(allowed) for folder, allowed in TABLE.items()}
    while free := [folder for folder, allowed in remaining.items() if not allowed]:
        for folder in free:
            del remaining[folder]
        for allowed in remaining.values():
            allowed.difference_update(free)
    assert not remaining


def torch_free_modules() -> list[str]:
    modules = []
    for path in FILES:
        if folder_of(path) in TORCH_FREE_FOLDERS and path.name != "__main__.py":
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    existing = [name for name in TORCH_FREE_MODULES if _exists(name)]
    return sorted({*modules, *existing})


def _exists(module: str) -> bool:
    path = SOURCE.parent / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_torch_free_packages_leave_torch_out() -> None:
    # one interpreter for all: what one of them brought in would be seen after it
    code = (
        "import importlib, sys\n"
        f"for name in {torch_free_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
