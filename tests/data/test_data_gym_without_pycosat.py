"""reasoning-gym's tasks where pycosat, or reasoning-gym itself, is not installed.

Each case runs in an interpreter of its own, in which the packages named are hidden from the import system.
"""

import importlib.util
import subprocess
import sys

import pytest

from paceline.config.errors import ConfigError
from paceline.config.task_library import import_reasoning_gym, refuse_without_solver
from paceline.data.gym_tasks import draw_examples, gym_params

HIDE = """
import sys
from importlib.machinery import PathFinder

def hide(*names):
    find = PathFinder.find_spec
    PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in names else find(name, *rest)
"""


def run_without(packages: str, code: str) -> str:
    command = [sys.executable, "-c", f"{HIDE}\nhide(*{packages.split()!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refusal_without(packages: str, call: str, setup: str = "") -> str:
    code = f"""
from paceline.config.errors import ConfigError
{setup}
try:
    {call}
except ConfigError as error:
    print(error)
"""
    return run_without(packages, code)


def test_tasks_that_need_no_pycosat_are_drawn_and_scored_without_it() -> None:
    code = """
from paceline.data.gym_tasks import draw_examples, gym_params
from paceline.rewards.functions import resolve
from paceline.types import RewardSpec
name = "word_sequence_reversal"
(one,), _ = draw_examples(name, gym_params(name, {}), 1, 3, "train", set())
score = resolve(RewardSpec("reasoning_gym_strict", {"dataset": name}))
print(score(one.answer, answer=one.answer, metadata=one.metadata, prompt=""))
"""
    assert run_without("pycosat", code) == "1.0"


def test_a_worker_that_only_scores_needs_no_pycosat_either() -> None:
    code = """
from paceline.rewards.functions import resolve
from paceline.types import RewardSpec
resolve(RewardSpec("reasoning_gym", {"dataset": "leg_counting"}))
print("ok")
"""
    assert run_without("pycosat", code) == "ok"


def test_zebra_puzzles_without_pycosat_are_refused_with_the_command_that_helps() -> None:
    setup = "from paceline.data.gym_tasks import gym_params"
    line = refusal_without("pycosat", "gym_params('zebra_puzzles', {})", setup)
    assert line.startswith("task.name = 'zebra_puzzles':")
    assert "pip install pycosat" in line and "C compiler" in line


def test_solving_by_another_way_in_says_what_is_missing() -> None:
    code = """
from paceline.config.task_library import import_reasoning_gym
gym = import_reasoning_gym("task.name", "zebra_puzzles")
try:
    gym.create_dataset("zebra_puzzles", seed=0, size=1)[0]
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    printed = run_without("pycosat", code)
    assert printed.startswith("pycosat ") and "pip install pycosat" in printed


def test_other_packages_still_find_pycosat_missing() -> None:
    code = """
import importlib.util
from paceline.config.task_library import import_reasoning_gym
import_reasoning_gym("task.name", "leg_counting")
import_reasoning_gym("task.name", "leg_counting")
print("pycosat" in sys.modules, importlib.util.find_spec("pycosat"))
"""
    assert run_without("pycosat", code) == "False None"


def test_importing_the_tasks_module_needs_no_reasoning_gym() -> None:
    assert run_without("pycosat reasoning_gym", "import paceline.data.tasks; print('ok')") == "ok"


def test_a_task_without_reasoning_gym_is_refused_with_both_ways_to_install_it() -> None:
    setup = "from paceline.data.gym_tasks import gym_params"
    line = refusal_without("pycosat reasoning_gym", "gym_params('leg_counting', {})", setup)
    assert line.startswith("task.name = 'leg_counting': needs reasoning-gym:")
    assert "paceline[gym]" in line and "paceline[gym-pure]" in line and "--no-deps reasoning-gym" in line


def test_a_reward_without_reasoning_gym_is_refused_with_what_to_install() -> None:
    setup = "from paceline.rewards.functions import resolve\nfrom paceline.types import RewardSpec"
    call = "resolve(RewardSpec('reasoning_gym', {'dataset': 'leg_counting'}))"
    line = refusal_without("reasoning_gym", call, setup)
    assert line.startswith("task.reward =") and "paceline[gym]" in line


def test_a_requirement_of_reasoning_gym_that_is_missing_is_named() -> None:
    setup = "from paceline.data.gym_tasks import gym_params"
    line = refusal_without("zss", "gym_params('leg_counting', {})", setup)
    assert "needs zss for reasoning-gym:" in line


def test_no_other_task_needs_pycosat() -> None:
    code = """
from paceline.config.task_library import import_reasoning_gym
gym = import_reasoning_gym("task.name", "all")
refused, num_drawn = [], 0
for name in sorted(set(gym.factory.DATASETS) - {"composite"}):  # composite has no questions of its own
    try:
        num_drawn += bool(gym.create_dataset(name, seed=0, size=1)[0]["question"])
    except ModuleNotFoundError as error:
        refused.append((name, error.name))
print(refused, num_drawn == len(gym.factory.DATASETS) - 2)
"""
    # one of the tasks prints dots of its own
    assert run_without("pycosat", code).endswith("[('zebra_puzzles', 'pycosat')] True")


@pytest.mark.skipif(importlib.util.find_spec("pycosat") is None, reason="pycosat is not installed")
def test_zebra_puzzles_are_drawn_where_pycosat_is_installed() -> None:
    refuse_without_solver("task.name", "zebra_puzzles")
    (one,), _ = draw_examples("zebra_puzzles", gym_params("zebra_puzzles", {}), 1, 3, "train", set())
    assert one.answer


def test_unknown_tasks_are_refused_with_the_nearest() -> None:
    assert import_reasoning_gym("task.name", "leg_counting") is sys.modules["reasoning_gym"]
    with pytest.raises(ConfigError, match=r"task\.name = 'leg_countin'.*leg_counting"):
        gym_params("leg_countin", {})
