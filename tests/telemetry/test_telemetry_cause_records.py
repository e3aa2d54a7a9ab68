"""causes/rank{r}.jsonl is read back as it was written, whatever a killed or resumed run left."""

import json
from pathlib import Path

import pytest

from paceline.telemetry.causes.records import (
    KernelTotal,
    StepCauses,
    cause_lines,
    causes_path,
    read_causes,
    total_cells,
)
from paceline.types import CAUSES

KERNEL = KernelTotal("gemm", "compute", "cuBLAS", True, 3, 0.5)
STRANGE = KernelTotal("secret", "compute", "", False, 1, 0.1)


def profiled(step: int, seconds: float = 1.0) -> StepCauses:
    cells = {
        stage: {cause: seconds * (i + 1) for i, cause in enumerate(CAUSES)} for stage in ("rollout", "idle")
    }
    return StepCauses(step, cells, (KERNEL, STRANGE), "operators", profiler_s=0.25)


def write(run_dir: Path, rank: int, *steps: StepCauses) -> Path:
    path = causes_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for step in steps:
            file.writelines(json.dumps(line) + "\n" for line in cause_lines(step))
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, 10, profiled(2), profiled(4))
    write(tmp_path, 2, profiled(2))
    ranks = read_causes(tmp_path)
    assert [(rank.rank, rank.num_torn_lines) for rank in ranks] == [(2, 0), (10, 0)]
    assert ranks[1].steps == (profiled(2), profiled(4))
    assert ranks[0].steps[0].unknown_kernels() == (STRANGE,)
    assert ranks[0].steps[0].seconds == pytest.approx(2 * sum(range(1, 7)))
    assert total_cells(ranks[1].steps)["idle"]["memory"] == pytest.approx(4.0)


def test_a_run_without_profiled_steps_has_none(tmp_path: Path) -> None:
    assert read_causes(tmp_path) == ()


def test_a_step_profiled_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    write(tmp_path, 0, profiled(2), profiled(4), profiled(6), profiled(4, seconds=7.0))
    (rank,) = read_causes(tmp_path)
    assert [step.step for step in rank.steps] == [2, 4]
    assert rank.steps[1] == profiled(4, seconds=7.0)


def test_torn_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 0, profiled(2), profiled(4))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    head_of_4 = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 4)
    lines[head_of_4] = lines[head_of_4][:9] + "\n"
    path.write_text("".join(lines), encoding="utf-8")
    (rank,) = read_causes(tmp_path)
    assert rank.num_torn_lines == 1
    assert [step.step for step in rank.steps] == [2, 4]
    assert rank.steps[1].cells == profiled(4).cells


@pytest.mark.parametrize("change", [{"v": 99}, {"kind": "cell"}])
def test_what_is_not_known_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = write(tmp_path, 0, profiled(2))
    record = {**json.loads(path.read_text(encoding="utf-8").splitlines()[1]), **change}
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"version|kind"):
        read_causes(tmp_path)
