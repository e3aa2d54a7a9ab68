"""reasoning-gym, imported in the one way that works with and without a C compiler.

reasoning-gym imports pycosat for a single task, zebra_puzzles, and does so as soon as it is imported itself. pycosat
is published as source in C only, so on a machine without a compiler that one task would cost all the others. Here
`import reasoning_gym` succeeds without it, and only that task is refused. The questions and their rewards are drawn
in different processes; both import reasoning-gym through this module.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

from paceline.config.errors import ConfigError

SOLVER = "pycosat"
SOLVER_TASKS = frozenset({"zebra_puzzles"})
"""The tasks that solve their puzzles with pycosat."""

_INSTALL = (
    "pip install 'paceline[gym]', or without a C compiler pip install 'paceline[gym-pure]' and then "
    "pip install --no-deps reasoning-gym"
)


def import_reasoning_gym(key: str, value: Any) -> ModuleType:
    """The package `reasoning_gym`, wanted because the setting `key` is `value`.

    Raises `ConfigError` for that setting when reasoning-gym, or a package that it needs, is not installed.
    """
    needs_stand_in = "reasoning_gym" not in sys.modules and not has_solver()
    if needs_stand_in:
        sys.modules[SOLVER] = _solver_stand_in()
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        missing = "reasoning-gym" if error.name == "reasoning_gym" else f"{error.name} for reasoning-gym"
        raise ConfigError(key, value, f"needs {missing}: {_INSTALL}") from error
    finally:
        # reasoning-gym keeps what it imported; everybody else shall go on seeing that pycosat is not installed
        if needs_stand_in:
            del sys.modules[SOLVER]


def refuse_without_solver(key: str, task: str) -> None:
    """Raises `ConfigError` for the setting `key` if `task` needs pycosat and it is not installed."""
    if task in SOLVER_TASKS and not has_solver():
        raise ConfigError(key, task, _solver_rule())


def has_solver() -> bool:
    """Whether pycosat is installed."""
    return importlib.util.find_spec(SOLVER) is not None


def _solver_stand_in() -> ModuleType:
    stand_in = ModuleType(
        SOLVER, "Stands where pycosat is not installed; solving anything with it is refused."
    )
    vars(stand_in).update(solve=_refuse_to_solve, itersolve=_refuse_to_solve)
    return stand_in


def _refuse_to_solve(*_args: Any, **_options: Any) -> NoReturn:
    raise ModuleNotFoundError(_solver_rule(), name=SOLVER)


def _solver_rule() -> str:
    tasks = " and ".join(sorted(SOLVER_TASKS))
    return f"{tasks} needs {SOLVER}, which is not installed: pip install {SOLVER} (it needs a C compiler)"
