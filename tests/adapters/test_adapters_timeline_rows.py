"""RL-Insight's rows as ledgers: stages, steps and ranks follow from role, name and time."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.adapters.traces.timeline_rows import import_rows, write_rows
from paceline.cli import main
from paceline.config import ConfigError
from paceline.report import report_figures, write_report
from paceline.telemetry.records import read_ledger

STEP_MS = 1000.0


def colocated(num_steps: int = 3, num_ranks: int = 2) -> list[dict[str, Any]]:
    """Ranks that generate, score and train in turns; the last rank's update is the longest."""
    rows = []
    for step in range(num_steps):
        for rank in range(num_ranks):
            parts = [
                ("rollout", "vllm_generate", 0, 500),
                ("actor", "compute_log_prob", 510, 600),
                ("ref", "compute_log_prob", 600, 680),
                ("actor", "actor_update", 700, 900 + rank),
            ]
            rows += [
                _row(role, name, rank, step * STEP_MS + start, step * STEP_MS + end)
                for role, name, start, end in parts
            ]
    return rows


def separate(num_steps: int = 3) -> list[dict[str, Any]]:
    """One training rank and one replica that generates all the time; both are called 0."""
    rows = [_row("rollout", "sglang_generate", 0, 0, num_steps * STEP_MS)]
    for step in range(num_steps):
        at = step * STEP_MS
        rows.append(_row("actor", "actor_update", 0, at + 200, at + 800))
        rows.append(_row("actor", "update_weights", 0, at + 800, at + 850))
    return rows


def _row(role: str, name: str, rank: int, start: float, end: float) -> dict[str, Any]:
    return {"role": role, "name": name, "rank_id": rank, "start_time_ms": start, "end_time_ms": end}


def write(rows: list[dict[str, Any]], path: Path) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json", ".parquet"])
def test_rows_become_a_ledger_of_every_rank(suffix: str, tmp_path: Path) -> None:
    run = import_rows(write(colocated(), tmp_path / f"rows{suffix}"))
    ledgers = read_ledger(write_rows(run, tmp_path / "run"))
    assert [ledger.rank for ledger in ledgers] == [0, 1]
    for ledger in ledgers:
        steps = ledger.steps()
        assert [step.step for step in steps] == [1, 2, 3]
        # a step ends for all ranks where the slowest one's update ends
        assert [round(step.end_s, 6) for step in steps] == [0.901, 1.901, 2.901]
        stages = {name: stage.self_s for name, stage in steps[0].stages.items()}
        update = 0.2 + 0.001 * ledger.rank
        expected = {"rollout": 0.5, "old_logprob": 0.09, "ref_logprob": 0.08, "update_actor": update}
        assert stages == pytest.approx(expected)
        assert steps[0].unaccounted_s == pytest.approx(0.901 - sum(expected.values()))


def test_roles_that_run_at_the_same_time_have_ranks_of_their_own(tmp_path: Path) -> None:
    run = import_rows(write(separate(), tmp_path / "rows.json"))
    assert run.labels == {0: "actor", 1: "rollout 0"}
    trainer, replica = read_ledger(write_rows(run, tmp_path / "run"))
    # with rows of the weight update, a step ends there, rollout or not
    assert [round(step.end_s, 6) for step in trainer.steps()] == [0.85, 1.85, 2.85]
    assert [step.unaccounted_s for step in replica.steps()] == pytest.approx([0.0] * 3, abs=1e-9)
    assert trainer.steps()[1].stages["sync"].self_s == pytest.approx(0.05)
    outside = [s for process in replica.processes for s in process.sections if s.step is None]
    assert outside[0].stages["rollout"].self_s == pytest.approx(0.15)


def test_several_updates_of_a_step_are_one_step(tmp_path: Path) -> None:
    rows = []
    for at in (0, 1000):
        rows.append(_row("rollout", "generate", 0, at, at + 400))
        rows += [_row("actor", "train_batch", 0, at + 400 + 100 * n, at + 490 + 100 * n) for n in range(4)]
    assert import_rows(write(rows, tmp_path / "rows.csv")).cuts == pytest.approx([0.79, 1.79])


def test_units_follow_from_the_columns_names(tmp_path: Path) -> None:
    rows = [{"role": "actor", "name": "actor_update", "rank": "rank_3", "start_us": 0, "end_us": 5e5}]
    run = import_rows(write(rows, tmp_path / "rows.json"))
    assert run.lanes[3][0].end == pytest.approx(0.5)


def test_unknown_names_and_bad_rows_are_said(tmp_path: Path) -> None:
    rows = [*colocated(1, 1), _row("actor", "dance", 0, 685, 695), _row("actor", "actor_update", 0, 9, 3)]
    run = import_rows(write(rows, tmp_path / "rows.jsonl"))
    assert any("dance" in note for note in run.notes)
    assert any(note.startswith("1 rows lack a number") for note in run.notes)


def test_rows_without_an_update_have_no_steps(tmp_path: Path) -> None:
    rows = [_row("rollout", "generate", 0, 0, 10)]
    run = import_rows(write(rows, tmp_path / "rows.json"))
    run_dir = write_rows(run, tmp_path / "run")
    assert any("no step is known" in note for note in run.notes)
    assert report_figures(run_dir)["num_steps"] == 0


def test_the_report_of_64_ranks_renders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(colocated(num_steps=5, num_ranks=64), tmp_path / "rows.parquet")
    assert main(["import", "rows", str(path), "--out", str(tmp_path / "run")]) == 0
    assert "Rows name no step" in capsys.readouterr().out
    assert "Rows name no step" in write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert report_figures(tmp_path / "run")["num_ranks"] == 64


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", "{}"),
        ("a.json", "[]"),
        ("a.json", "["),
        ("a.csv", "role,name\nx,y\n"),
        ("a.parquet", "no"),
        ("a.jsonl", "[1]"),
    ],
)
def test_what_holds_no_rows_is_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError):
        import_rows(tmp_path / name)
    assert main(["import", "rows", str(tmp_path / "nothing.csv")]) == 2
