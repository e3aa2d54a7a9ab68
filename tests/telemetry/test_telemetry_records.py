"""Reading a ledger in part: spans of the steps that are wanted, every section, and the same torn lines."""

import pytest

from paceline.telemetry.ledger import Ledger
from paceline.telemetry.records import read_ledger


@pytest.fixture
def run_dir(tmp_path):
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl")
    with ledger.span("setup"):
        pass
    for step in range(1, 13):
        with ledger.step(step), ledger.span("rollout"), ledger.span("rollout", "decode, of step 1"):
            pass
    ledger.close()
    return tmp_path


def spans_by_step(ledger):
    spans = [span for process in ledger.processes for span in process.spans]
    return {step: [span for span in spans if span.step == step] for step in {span.step for span in spans}}


def test_only_spans_of_wanted_steps_and_outside_steps_are_read(run_dir):
    (whole,), (part,) = read_ledger(run_dir), read_ledger(run_dir, spans_of={1, 11})
    assert set(spans_by_step(part)) == {None, 1, 11}
    for step, spans in spans_by_step(part).items():
        assert spans == spans_by_step(whole)[step]


def test_sections_are_all_read_whatever_spans_are_wanted(run_dir):
    (whole,), (part,) = read_ledger(run_dir), read_ledger(run_dir, spans_of=())
    assert part.steps() == whole.steps()
    assert [p.sections for p in part.processes] == [p.sections for p in whole.processes]


def test_a_ledger_written_with_other_spaces_is_read_alike(run_dir):
    path = run_dir / "ledger" / "rank0.jsonl"
    wanted = spans_by_step(read_ledger(run_dir, spans_of={3})[0])
    path.write_text(path.read_text().replace(": ", ":"))
    assert spans_by_step(read_ledger(run_dir, spans_of={3})[0]) == wanted


def test_torn_lines_are_counted_and_new_processes_found_also_when_spans_are_left_out(run_dir):
    path = run_dir / "ledger" / "rank0.jsonl"
    text = path.read_text()
    path.write_text(
        text + text[: len(text) // 2] + "\n" + text.replace('{"v": 1, "kind": "run"', '{"v": 1, "ki', 1)
    )
    (whole,), (part,) = read_ledger(run_dir), read_ledger(run_dir, spans_of={2})
    assert part.num_torn_lines == whole.num_torn_lines > 0
    assert len(part.processes) == len(whole.processes) == 3
    assert part.steps() == whole.steps()
