"""Rollouts written down and given again: samples with tokens, log-probs, versions and verdicts, bit for bit.

A recording is a folder: `recording.json` says what it was made with, `step{n}.jsonl` holds one line per group. It lets
two runs train on identical input whatever their training side does, and costs neither sampling nor scoring the second
time. A sample is found by its prompt and its seed, which master seed, prompt, number in the group and step determine;
so the number of ranks and the order of prompts may differ.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.files import write_whole
from paceline.rollout.protocol import OnSample, RolloutRequest, RolloutStats, SamplingParams
from paceline.telemetry.jsonl import decode_number, encode_number
from paceline.types import Group, Prompt, Sample, Verdict

RECORD_VERSION = 1
HEADER_FILE = "recording.json"


class ReplayError(RuntimeError):
    """A run asks for a sample that its recording does not hold; the message says which, and what may differ."""


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """What a replaying run must have alike, because log-probs and lengths depend on it."""

    seed: int
    temperature: float
    max_new_tokens: int


class RolloutRecorder:
    """Writes a recording. A step done again replaces what was recorded of it."""

    def __init__(self, folder: Path, header: RecordingHeader) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / HEADER_FILE, json.dumps({"v": RECORD_VERSION, **asdict(header)}) + "\n")
        self._step: int | None = None
        self._lines: list[str] = []

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Records groups of `step`, after those already added for it (dynamic sampling adds several times)."""
        if step != self._step:
            self._step, self._lines = step, []
        self._lines += [json.dumps(_group_record(group), ensure_ascii=False) + "\n" for group in groups]
        write_whole(step_file(self.folder, step), "".join(self._lines))


class ReplayEngine:
    """A `RolloutEngine` that computes nothing: it gives the samples of a recording again, and their verdicts.

    Recorded weight versions stay in the samples; `weight_version` is the caller's count and changes nothing.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `ValueError` when the folder holds no recording of this version."""
        self.folder = folder
        self.header = read_header(folder)
        self.weight_version = 0
        self._step: int | None = None
        self._prompts: dict[str, str] = {}
        self._found: dict[tuple[str, int], tuple[Sample, Verdict]] = {}

    def seek(self, step: int) -> None:
        """The step whose samples are asked for next.

        Raises:
            ReplayError: nothing was recorded of it.
        """
        if step == self._step:
            return
        path = step_file(self.folder, step)
        if not path.exists():
            raise ReplayError(f"{self.folder} holds no rollout of step {step}")
        self._step, self._prompts, self._found = step, {}, {}
        for line in path.read_text(encoding="utf-8").splitlines():
            self._take(json.loads(line))

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """The recorded samples of each request, by seed.

        Raises:
            ReplayError: a sample was not recorded, or its prompt was another text.
        """
        generated = []
        for index, request in enumerate(requests):
            samples = tuple(self._recorded(request.prompt, seed)[0] for seed in request.seeds)
            if on_sample is not None:
                for sample in samples:
                    on_sample(index, sample)
            generated.append(samples)
        return generated

    def verdict(self, sample: Sample) -> Verdict:
        """What was said of a sample that `generate` has given."""
        return self._found[sample.prompt_id, sample.seed][1]

    def sleep(self) -> None:
        """Holds no cache."""

    @property
    def stats(self) -> RolloutStats:
        """Nothing was computed."""
        return RolloutStats()

    def _take(self, record: Mapping[str, Any]) -> None:
        self._prompts[record["prompt_id"]] = record["prompt_sha256"]
        for raw, verdict in zip(record["samples"], record["verdicts"], strict=True):
            sample = _sample_of(raw)
            self._found[sample.prompt_id, sample.seed] = sample, _verdict_of(verdict)

    def _recorded(self, prompt: Prompt, seed: int) -> tuple[Sample, Verdict]:
        found = self._found.get((prompt.prompt_id, seed))
        if found is None:
            raise ReplayError(
                f"step {self._step}: prompt {prompt.prompt_id} with seed {seed} is not in {self.folder}; task, "
                "run.seed, batch.num_prompts, batch.num_samples and what decides on dynamic sampling must be as "
                "recorded"
            )
        if self._prompts[prompt.prompt_id] != _fingerprint(prompt):
            raise ReplayError(
                f"step {self._step}: prompt {prompt.prompt_id} has other tokens than the one in {self.folder}"
            )
        return found


def read_header(folder: Path) -> RecordingHeader:
    """What a recording was made with. Raises `ValueError` where there is none that this version reads."""
    path = folder / HEADER_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"holds no {HEADER_FILE}") from None
    version = record.pop("v", None)
    if version != RECORD_VERSION:
        raise ValueError(
            f"holds a recording of version {version}, and this paceline reads version {RECORD_VERSION}"
        )
    return RecordingHeader(**record)


def recorded_steps(folder: Path) -> list[int]:
    """Steps a recording holds, in order."""
    return sorted(int(path.stem.removeprefix("step")) for path in folder.glob("step*.jsonl"))


def step_file(folder: Path, step: int) -> Path:
    """Where the groups of a step are."""
    return folder / f"step{step}.jsonl"


def _fingerprint(prompt: Prompt) -> str:
    return hashlib.sha256(repr(tuple(prompt.token_ids)).encode()).hexdigest()


def _group_record(group: Group) -> dict[str, Any]:
    return {
        "v": RECORD_VERSION,
        "prompt_id": group.prompt.prompt_id,
        "prompt_sha256": _fingerprint(group.prompt),
        "samples": [_sample_record(sample) for sample in group.samples],
        "verdicts": [_verdict_record(verdict) for verdict in group.verdicts],
    }


def _sample_record(sample: Sample) -> dict[str, Any]:
    return {**asdict(sample), "logprobs": [encode_number(value) for value in sample.logprobs]}


def _sample_of(record: Mapping[str, Any]) -> Sample:
    logprobs = tuple(decode_number(value) for value in record["logprobs"])
    names = ("token_ids", "loss_mask", "token_versions", "prompt_token_ids")  # the last one since episodes
    tuples = {name: tuple(record[name]) for name in names if name in record}
    return Sample(**{**record, **tuples, "logprobs": logprobs})


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    parts = verdict.parts
    return {
        "outcome": verdict.outcome,
        "score": None if verdict.score is None else encode_number(verdict.score),
        "seconds": verdict.seconds,
        "message": verdict.message,
        "parts": None if parts is None else {name: _verdict_record(part) for name, part in parts.items()},
    }


def _verdict_of(record: Mapping[str, Any]) -> Verdict:
    score, parts = record["score"], record["parts"]
    return Verdict(
        record["outcome"],
        None if score is None else decode_number(score),
        record["seconds"],
        record["message"],
        None if parts is None else {name: _verdict_of(part) for name, part in parts.items()},
    )
