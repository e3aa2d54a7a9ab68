"""verl's rollout dumps (`trainer.rollout_data_dir`, one `<step>.jsonl` a step) as sample records."""

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

FIELDS = frozenset({"input", "output", "score"})
"""What every row of a dump has."""

VERSION = 1


def find_dumps(folder: Path) -> dict[int, Path]:
    """Step to its dump, of those below `folder`. Where several have the same step, the first by name."""
    found: dict[int, Path] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        if path.stem.isdigit() and _is_dump(path):
            found.setdefault(int(path.stem), path)
    return dict(sorted(found.items()))


def _is_dump(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in islice(lines, 1):
            try:
                record = json.loads(line)
            except ValueError:
                return False
            return isinstance(record, dict) and record.keys() >= FIELDS
    return False


def read_dump(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """The rows as sample records. Token counts, finish reasons and advantages are not in a dump and stay out."""
    prompts: dict[str, tuple[int, int]] = {}  # prompt to its number and how many samples of it came
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a line that a kill left half-written
            if not isinstance(row, dict) or not row.keys() >= FIELDS:
                continue
            prompt_id = str(
                row.get("uid") or row["input"]
            )  # older releases write no uid: samples share their prompt
            number, index = prompts.get(prompt_id, (len(prompts), 0))
            prompts[prompt_id] = number, index + 1
            score = row["score"]
            is_score = isinstance(score, int | float) and math.isfinite(score)
            yield {
                "v": VERSION,
                "step": step,
                "prompt_id": str(number),
                "sample_index": index,
                "prompt": str(row["input"]),
                "completion": str(row["output"]),
                "answer": None if row.get("gts") is None else str(row["gts"]),
                "outcome": "score" if is_score else "error",
                "score": score if is_score else None,
                "message": None if is_score else "the dump holds no number",
                "reward": score if is_score else None,
            }
