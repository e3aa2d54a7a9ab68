"""From the task section of a recipe to prompts, held-out prompts, and the name of their reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.arithmetic import allowed_new_tokens, stated_context
from paceline.config.errors import ConfigError
from paceline.config.rewards import rule_names
from paceline.config.schema import Config
from paceline.data.chat import ChatTokenizer, PromptRenderer
from paceline.data.gym_tasks import draw_examples, gym_params
from paceline.data.prompts import Example, find_files, nearest_column, read_examples
from paceline.data.seeds import child_seed
from paceline.data.splitting import HELD_OUT_SEED, nothing_left, split_rows
from paceline.types import Prompt, RewardSpec

_NEEDS_ANSWER = ("exact_match", "math")


@dataclass(frozen=True, slots=True)
class Task:
    """What a run trains on, is measured on and is rewarded by; no question is in more than one of the three sets.

    `num_dropped_overlong` counts prompts (training and held-out) left out because they leave no room for a response;
    `num_limited` those kept whose room is less than `rollout.max_new_tokens`; `num_duplicates` questions passed over
    because another set (for reasoning-gym: any set) had them already. `notes` are sentences for the person.
    """

    train: tuple[Prompt, ...]
    evaluation: tuple[Prompt, ...]
    reward: RewardSpec
    num_dropped_overlong: int
    num_limited: int
    num_duplicates: int
    num_examples: int
    notes: tuple[str, ...]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, held-out ones included."""
        return max(len(prompt.token_ids) for prompt in (*self.train, *self.evaluation))


@dataclass(frozen=True, slots=True)
class Questions:
    """A task's questions before they are rendered; no question is in more than one of the three lists."""

    train: list[Example]
    evaluation: list[Example]
    shown: list[Example]
    reward: RewardSpec
    num_duplicates: int
    notes: tuple[str, ...]


def max_new_tokens_for(prompt: Prompt, max_new_tokens: int, max_context: int | None) -> int:
    """Longest response to this prompt in tokens: what is asked for, or what the context leaves if that is less."""
    return allowed_new_tokens(len(prompt.token_ids), max_new_tokens, max_context)


def build_task(config: Config, tokenizer: ChatTokenizer, max_context: int | None = None) -> Task:
    """Draws or reads the questions, splits them, and renders every prompt once.

    `max_context` is what the model states, in tokens; `model.max_context` overrules it, and without either a local
    model folder is asked. Raises `ConfigError` when there is nothing to train on, too little to hold out, or an
    over-long prompt that may not be dropped.
    """
    questions = gym_questions(config) if config.task.name is not None else _file_questions(config)
    if not questions.train:
        raise ConfigError("task", config.task.name or config.task.path, "there are no training prompts in it")
    _check_answers(config, questions)
    renderer = PromptRenderer(config, tokenizer, questions.shown)
    context = config.model.max_context or max_context or stated_context(config.model.path)
    train = [renderer.render(example) for example in questions.train]
    evaluation = [renderer.render(example) for example in questions.evaluation]
    kept_train = _without_overlong(config, train, context)
    kept_evaluation = _without_overlong(config, evaluation, context)
    if not kept_train:
        rule = f"leaves no training prompt: all {len(train)} fill the context of {context} tokens"
        raise ConfigError("task.overlong_prompts", config.task.overlong_prompts, rule)
    num_dropped = len(train) + len(evaluation) - len(kept_train) - len(kept_evaluation)
    wanted = config.rollout.max_new_tokens
    num_limited = sum(
        max_new_tokens_for(prompt, wanted, context) < wanted for prompt in (*kept_train, *kept_evaluation)
    )
    notes = [*questions.notes]
    if num_dropped:
        notes.append(f"{num_dropped} prompts dropped: they fill the context of {context} tokens")
    if num_limited:
        notes.append(
            f"{num_limited} prompts leave less than rollout.max_new_tokens = {wanted} of {context} tokens"
        )
    return Task(
        tuple(kept_train),
        tuple(kept_evaluation),
        questions.reward,
        num_dropped,
        num_limited,
        questions.num_duplicates,
        len(questions.shown),
        tuple(notes),
    )


def gym_questions(config: Config) -> Questions:
    """Questions of a reasoning-gym task, solved by it. Raises `ConfigError` when it runs out of different ones."""
    task = config.task
    assert task.name is not None
    params = gym_params(task.name, task.params)
    taken: set[str] = set()
    shown, repeated_shown = draw_examples(
        task.name, params, task.num_examples, child_seed(HELD_OUT_SEED, "task", "examples"), "shown", taken
    )
    evaluation, repeated_evaluation = draw_examples(
        task.name, params, task.eval_size, child_seed(HELD_OUT_SEED, "task", "evaluation"), "eval", taken
    )
    num_held_out = len(shown) + len(evaluation)
    if num_held_out < task.num_examples + task.eval_size:
        raise _too_few_questions(config, num_held_out)
    train, repeated_train = draw_examples(
        task.name, params, task.size, child_seed(config.run.seed, "task", "train"), "train", taken
    )
    if not train:
        raise _too_few_questions(config, num_held_out)
    notes = []
    if len(train) < task.size:
        notes.append(
            f"{task.name} has only {len(train)} different questions beside the held-out ones, fewer than "
            f"task.size = {task.size}"
        )
    name = "reasoning_gym" if task.reward == "auto" else task.reward
    gym_reward = name in ("reasoning_gym", "reasoning_gym_strict")
    reward = RewardSpec(name, {"dataset": task.name, "params": params} if gym_reward else {})
    num_repeated = repeated_shown + repeated_evaluation + repeated_train
    return Questions(train, evaluation, shown, reward, num_repeated, tuple(notes))


def _file_questions(config: Config) -> Questions:
    task = config.task
    assert task.path is not None
    if task.reward in ("reasoning_gym", "reasoning_gym_strict"):
        raise ConfigError("task.reward", task.reward, "scores only tasks given by task.name", "exact_match")
    files = find_files(task.path, "train", "task.path")
    rows = read_examples(files, task.prompt_key, task.answer_key, "row")
    if not rows:
        raise ConfigError("task.path", task.path, "holds no rows, so nothing could be trained")
    notes = [files_read(task.path, files)]
    held_out: list[Example] | None = None
    if task.eval_path is not None and task.eval_size:
        eval_files = find_files(task.eval_path, "evaluation", "task.eval_path")
        held_out = read_examples(
            eval_files, task.prompt_key, task.answer_key, "eval", path_key="task.eval_path"
        )
        if not held_out:
            raise ConfigError("task.eval_path", task.eval_path, "holds no rows, so nothing could be measured")
        notes.append(f"{files_read(task.eval_path, eval_files)}; each of its {len(held_out)} rows is scored")
    split = split_rows(config, rows, held_out)
    reward = RewardSpec("exact_match" if task.reward == "auto" else task.reward)
    return Questions(split.train, split.evaluation, split.shown, reward, split.num_duplicates, tuple(notes))


def _too_few_questions(config: Config, num_different: int) -> ConfigError:
    has = f"{config.task.name} with these parameters has only about {num_different} different questions"
    return nothing_left(config, has, [1] * num_different)


def files_read(path: str, files: Sequence[Path]) -> str:
    """A note that names the files."""
    return f"{path}: read {len(files)} file{'s' if len(files) > 1 else ''} ({', '.join(f.name for f in files[:3])})"


def _check_answers(config: Config, questions: Questions) -> None:
    needy = sorted(set(rule_names(config, questions.reward.name).values()) & set(_NEEDS_ANSWER))
    if not needy:
        return
    for example in (*questions.train, *questions.evaluation):
        if example.answer is None:
            rule = f"{example.where} has no such column, and reward {needy[0]} needs an answer"
            nearest = nearest_column(example, config.task.answer_key)
            raise ConfigError("task.answer_key", config.task.answer_key, rule, nearest)


def _without_overlong(config: Config, prompts: Sequence[Prompt], context: int | None) -> list[Prompt]:
    kept = [prompt for prompt in prompts if max_new_tokens_for(prompt, 1, context)]
    if len(kept) < len(prompts) and config.task.overlong_prompts == "refuse":
        longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
        rule = (
            f"{len(prompts) - len(kept)} of {len(prompts)} prompts leave no room for a response in the context of "
            f"{context} tokens; the longest, {longest.prompt_id}, has {len(longest.token_ids)}"
        )
        raise ConfigError("task.overlong_prompts", "refuse", rule, "drop")
    return kept
