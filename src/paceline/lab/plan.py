"""From a recipe and features to the runs of an ablation: their configs, and the order that drift cannot favour."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.config import Config, ConfigError, dump_config, load_config, load_sft_config
from paceline.config.critic import mini_batches_per_rollout
from paceline.config.loading import read_recipe
from paceline.config.sft import is_sft
from paceline.lab.arms import RECORDING, Arm, as_overrides, baseline_arm
from paceline.lab.effects import check_arm
from paceline.lab.results import BASELINE, RolloutMode

TRAINING_SECTIONS = frozenset({"train", "critic", "checkpoint", "telemetry", "batch", "algorithm", "lora"})
"""Sections whose settings act after samples are scored, but for `SAMPLING_KEYS`."""
SAMPLING_KEYS = frozenset(
    {"batch.num_prompts", "batch.num_samples", "algorithm.dynamic_sampling", "algorithm.max_generations"}
)

RECORDING_FOLDER = "recording"


@dataclass(frozen=True, slots=True)
class AblationSettings:
    """How the comparison is made; see `paceline ablate --help`."""

    num_pairs: int = 6
    num_steps: int = 8
    num_warmup: int = 2
    alpha: float = 0.05
    margin: float = 0.02
    rollouts: Literal["auto", "replay", "sample"] = "auto"

    def __post_init__(self) -> None:
        """Raises `ConfigError` where a value cannot be."""
        if self.num_pairs < 1:
            raise ConfigError(
                "--pairs", self.num_pairs, "must be at least 1 (an interval takes 2, a verdict 4)", "6"
            )
        if not 0 <= self.num_warmup < self.num_steps:
            rule = f"must be at least 0 and below --steps = {self.num_steps}"
            raise ConfigError("--warmup", self.num_warmup, rule, str(max(0, self.num_steps - 1)))
        if not 0.0 < self.alpha < 1.0:
            raise ConfigError("--alpha", self.alpha, "must lie between 0 and 1", "0.05")
        if self.margin < 0.0:
            raise ConfigError("--margin", self.margin, "must be at least 0", "0.02")


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One process to start; `round` is -1 for the recording."""

    name: str
    arm: str
    round: int
    position: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before the first run. `arms[0]` is the baseline."""

    folder: Path
    recipe: str | None
    overrides: tuple[str, ...]
    arms: tuple[Arm, ...]
    settings: AblationSettings
    mode: RolloutMode
    command: Literal["train", "sft"]
    shared: tuple[str, ...]
    """Settings that the lab gives every run, below those of the arms."""

    def config(self, run: PlannedRun) -> Config:
        """The config of one run. Raises `ConfigError` where its settings contradict one another."""
        own = [f"run.name={run.name}", f"run.dir={self.folder / 'runs'}", "run.resume=auto"]
        recording = self.folder / RECORDING_FOLDER
        if run.arm == RECORDING:
            own.append(f"rollout.record={recording}")
        elif self.mode == "replay":
            own.append(f"rollout.replay={recording}")
        arm = next((arm for arm in self.arms if arm.name == run.arm), self.arms[0])
        return self._load([*own, *as_overrides(arm.keys)])

    def _load(self, last: Sequence[str]) -> Config:
        load = load_sft_config if self.command == "sft" else load_config
        return load(self.recipe, [*self.overrides, *self.shared, *last])

    def runs(self) -> list[PlannedRun]:
        """All runs in the order they are started: the recording, then the rounds."""
        runs = [PlannedRun(RECORDING, RECORDING, -1, 0)] if self.mode == "replay" else []
        names = [arm.name for arm in self.arms]
        for number in range(self.settings.num_pairs):
            runs += [
                PlannedRun(f"r{number:02d}-{arm}", arm, number, position)
                for position, arm in enumerate(order_of_round(names, number))
            ]
        return runs

    def identity(self) -> dict[str, Any]:
        """What must not change between a start and a later one that goes on. The number of pairs may grow."""
        settings = asdict(self.settings)
        del settings["num_pairs"], settings["alpha"], settings["margin"], settings["rollouts"]
        baseline = dump_config(self._load(as_overrides(self.arms[0].keys)))
        arms = {arm.name: dict(arm.keys) for arm in self.arms}
        text = json.dumps({**settings, "mode": self.mode, "baseline": baseline, "arms": arms})
        return dict(json.loads(text))


def make_plan(
    recipe: str | None,
    overrides: Sequence[str],
    arms: Sequence[Arm],
    settings: AblationSettings,
    folder: Path | None = None,
) -> Plan:
    """Checks every arm's config and decides on rollouts and order; starts nothing.

    Raises:
        ConfigError: the recipe or an arm is refused, or an arm changes nothing.
    """
    config = _load_any(recipe, overrides)
    command: Literal["train", "sft"] = "sft" if is_sft(config) else "train"
    everything = (baseline_arm(), *arms)
    plan = Plan(
        folder=folder or Path(config.run.dir) / f"ablation-{config.run.name}",
        recipe=recipe,
        overrides=tuple(overrides),
        arms=everything,
        settings=settings,
        mode=_rollout_mode(everything, settings.rollouts, command),
        command=command,
        shared=tuple(shared_settings(config, everything, settings)),
    )
    _check_arms(plan)
    return plan


def _load_any(recipe: str | None, overrides: Sequence[str]) -> Config:
    """A recipe for sampling or for supervised updates: it says itself which."""
    content = read_recipe(Path(recipe)) if recipe is not None else {}
    schedule = content.get("schedule")
    supervised = isinstance(schedule, dict) and schedule.get("name") == "sft"
    load = load_sft_config if supervised or "schedule.name=sft" in overrides else load_config
    return load(recipe, overrides)


def order_of_round(arms: Sequence[str], number: int) -> list[str]:
    """The order of one round: baseline in the middle, so that none is far from it, and every other round backwards, so
    that a steady drift counts for each arm once with one sign and once with the other."""
    others = [arm for arm in arms if arm != BASELINE]
    middle = len(others) // 2
    order = [*others[:middle], BASELINE, *others[middle:]]
    return order if number % 2 == 0 else order[::-1]


def shared_settings(config: Config, arms: Sequence[Arm], settings: AblationSettings) -> list[str]:
    """What every run of an ablation has: few steps, and nothing in them that no arm is about."""
    touched = {key for arm in arms for key in arm.keys}
    shared = ["telemetry.live=off", "telemetry.sinks=[]", "checkpoint.export_hf=false"]
    if is_sft(config):
        shared.append(f"sft.max_steps={settings.num_steps}")
    else:
        shared += [f"run.num_steps={settings.num_steps}", "run.save_samples_every=1"]
        updates = settings.num_steps * mini_batches_per_rollout(config) * config.batch.num_epochs
        shared.append(f"train.warmup_steps={min(config.train.warmup_steps, updates)}")
    if not any(key.startswith(("run.eval", "task.eval")) for key in touched):
        shared += ["run.eval_every=0", "task.eval_size=0"]
    if not any(key.startswith("checkpoint.") for key in touched):
        shared += ["checkpoint.every=0", "checkpoint.save_final=false"]
    return shared


def _rollout_mode(
    arms: Sequence[Arm], wanted: Literal["auto", "replay", "sample"], command: str
) -> RolloutMode:
    """auto: replay where no arm has a setting that could change what is sampled or how fast."""
    if command == "sft":
        if wanted == "replay":
            raise ConfigError("--rollouts", wanted, "supervised runs have no rollouts", "auto")
        return "sample"
    if wanted != "auto":
        return wanted
    keys = {key for arm in arms for key in arm.keys}
    training_side = all(key.split(".")[0] in TRAINING_SECTIONS and key not in SAMPLING_KEYS for key in keys)
    return "replay" if training_side else "sample"


def _check_arms(plan: Plan) -> None:
    """Loads every arm's config, so that a refusal comes before the first run: also of an arm that may be the baseline
    itself."""
    probe = PlannedRun("probe", BASELINE, 0, 0)
    baseline = plan.config(probe)
    for arm in plan.arms[1:]:
        config = plan.config(PlannedRun("probe", arm.name, 0, 0))
        check_arm(arm, baseline, config, replays=plan.mode == "replay")
