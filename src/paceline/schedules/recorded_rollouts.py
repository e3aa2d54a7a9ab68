"""Rollouts recorded for later runs, or taken from an earlier one (`rollout.record`, `rollout.replay`)."""

from collections.abc import Sequence
from pathlib import Path

from paceline.config import Config, ConfigError
from paceline.rollout import RolloutRequest, SamplingParams
from paceline.rollout.recording import (
    RecordingHeader,
    ReplayEngine,
    RolloutRecorder,
    recorded_steps,
)
from paceline.types import Group


def open_recorder(config: Config, is_writer: bool) -> RolloutRecorder | None:
    """Writes the run's rollouts down where the config asks for it and this rank is the one that writes.

    Raises:
        ConfigError: the folder cannot be written.
    """
    if config.rollout.record is None or not is_writer:
        return None
    folder = Path(config.rollout.record)
    try:
        return RolloutRecorder(folder, _header(config))
    except OSError as error:
        rule = f"{folder} cannot be written ({error.strerror}); name a folder that may be"
        raise ConfigError("rollout.record", config.rollout.record, rule) from error


def open_replay(config: Config) -> ReplayEngine | None:
    """The recording to train on, where the config names one.

    Raises:
        ConfigError: there is none, it holds too few steps, or it was made with settings that log-probs depend on.
    """
    if config.rollout.replay is None:
        return None
    folder = Path(config.rollout.replay)
    try:
        replay = ReplayEngine(folder)
    except ValueError as error:
        raise ConfigError("rollout.replay", str(folder), str(error)) from error
    wanted, found = _header(config), replay.header
    for key, ours, recorded in (
        ("run.seed", wanted.seed, found.seed),
        ("rollout.temperature", wanted.temperature, found.temperature),
        ("rollout.max_new_tokens", wanted.max_new_tokens, found.max_new_tokens),
    ):
        if ours != recorded:
            rule = f"must be that of the recording {folder} (rollout.replay)"
            raise ConfigError(key, ours, rule, str(recorded))
    steps = recorded_steps(folder)
    if missing := sorted(set(range(1, config.run.num_steps + 1)) - set(steps)):
        rule = f"asks for step {missing[0]}, which the recording {folder} does not hold"
        raise ConfigError("run.num_steps", config.run.num_steps, rule, str(missing[0] - 1))
    return replay


def replay_groups(
    replay: ReplayEngine, step: int, requests: Sequence[RolloutRequest], params: SamplingParams
) -> list[Group]:
    """The recorded groups of `requests`, all of them on every rank; nothing is sampled, scored or exchanged."""
    replay.seek(step)
    generated = replay.generate(requests, params)
    return [
        Group(request.prompt, samples, tuple(replay.verdict(sample) for sample in samples))
        for request, samples in zip(requests, generated, strict=True)
    ]


def _header(config: Config) -> RecordingHeader:
    return RecordingHeader(config.run.seed, config.rollout.temperature, config.rollout.max_new_tokens)
