import importlib.util
import subprocess
import sys

import pytest

from paceline.config.errors import ConfigError
from paceline.config.task_library import import_reasoning_gym
from paceline.rewards.functions import resolve
from paceline.types import RewardSpec


def score(name: str, completion: str, answer: str | None = None, metadata=None, **params) -> float:
    return resolve(RewardSpec(name, params))(completion, answer=answer, metadata=metadata or {}, prompt="p")


def test_exact_match_ignores_surrounding_white_space_only():
    assert score("exact_match", " Paris\n", "Paris") == 1.0
    assert score("exact_match", "paris", "Paris") == 0.0
    assert score("exact_match", "paris", "Paris", casefold=True) == 1.0
    assert score("exact_match", "Paris.", "Paris") == 0.0


def test_exact_match_without_an_answer_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="needs a reference answer"):
        score("exact_match", "x", None)


def gym_entry(name: str, **params):
    gym = import_reasoning_gym("task.name", name)
    return gym.create_dataset(name, seed=1, size=1, **params)[0]


def test_reasoning_gym_gives_the_tasks_own_score_and_strict_gives_no_part_marks():
    entry = gym_entry("word_sequence_reversal", min_words=2, max_words=3)
    for name, half in (("reasoning_gym", 0.44), ("reasoning_gym_strict", 0.0)):

        def scored(completion: str, name: str = name) -> float:
            return score(name, completion, metadata={"entry": entry}, dataset="word_sequence_reversal")

        assert scored("go, hundred") == 1.0
        assert scored(" go, hundred\n") == 1.0
        assert scored("The answer is go, hundred") == pytest.approx(half)
        assert scored("hundred, go") == 0.0
        assert scored("") == 0.0


def test_reasoning_gym_scorers_that_raise_stay_errors():
    entry = gym_entry("prime_factorization")
    with pytest.raises(ValueError, match="invalid literal"):
        score("reasoning_gym", "not × numbers", metadata={"entry": entry}, dataset="prime_factorization")


def test_reasoning_gym_without_a_task_is_refused():
    with pytest.raises(ConfigError, match=r"task\.reward = 'reasoning_gym'.*task\.name"):
        resolve(RewardSpec("reasoning_gym"))


@pytest.mark.parametrize(
    ("function", "completion", "answer", "expected"),
    [
        ("obey", "0.25", None, 0.25),
        ("only_completion", "abc", None, 3.0),
        ("completion_and_answer", "abc", "abc", 1.0),
        ("everything", "abc", None, 1.0),
    ],
)
def test_users_functions_may_take_fewer_of_the_keywords(function, completion, answer, expected):
    assert score(f"rewards_to_score:{function}", completion, answer) == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exact_macth", "nearest: exact_match"),
        ("rewards_to_score", "module:function"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("rewards_to_score:completion_answer", "nearest: rewards_to_score:completion_and_answer"),
        ("rewards_to_score:not_a_function", "is a int, not a function"),
        ("rewards_to_score:demands_truth", "demands 'truth'"),
        ("rewards_to_score:no_parameters", "must take the completion"),
        ("__main__:f", "cannot import `__main__`"),
    ],
)
def test_a_reward_that_cannot_work_is_one_message_about_task_reward(name, words):
    with pytest.raises(ConfigError) as refused:
        resolve(RewardSpec(name))
    assert refused.value.key == "task.reward"
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_module_that_fails_while_it_is_imported_is_the_same_refusal(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("raise OSError('no licence file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="OSError: no licence file"):
        resolve(RewardSpec("broken_reward:score"))


def test_a_reward_beside_the_caller_is_found_by_an_installed_command(tmp_path):
    (tmp_path / "my_reward.py").write_text("def score(completion, answer):\n    return 0.5\n")
    script = tmp_path / "bin" / "command.py"
    script.parent.mkdir()
    script.write_text(
        "from paceline.rewards.pool import RewardPool\n"
        "from paceline.rewards.functions import resolve\n"
        "from paceline.types import RewardJob, RewardSpec\n"
        "spec = RewardSpec('my_reward:score')\n"
        "resolve(spec)\n"
        "with RewardPool(spec, 1, 5.0) as pool:\n"
        "    print(pool.score([RewardJob('', '')])[0].score)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("0.5\n", "")


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is not None, reason="math-verify is installed")
def test_math_without_math_verify_says_what_to_install():
    with pytest.raises(ConfigError, match="pip install"):
        resolve(RewardSpec("math"))


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_math_compares_expressions_and_not_their_spelling():
    assert score("math", r"so the answer is $\frac{1}{2}$", r"\frac{1}{2}") == 1.0
    assert score("math", "The answer is 0.5", "1/2") == 1.0
    assert score("math", "The answer is 0.6", "1/2") == 0.0
    assert score("math", "no idea", "1/2") == 0.0
    assert score("math", "it is 42", "#### 42") == 1.0


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
@pytest.mark.parametrize(("completion", "expected"), [("$x^2+1$", 1.0), ("$1$", 0.0)])
def test_math_reads_a_bare_reference_answer_whole(completion, expected):
    assert score("math", completion, "1+x^2") == expected


def test_importing_the_rewards_loads_neither_torch_nor_the_task_libraries():
    code = (
        "import sys, paceline.rewards.pool, paceline.rewards.functions, paceline.rewards.worker; "
        "print([m for m in ('torch', 'reasoning_gym', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
