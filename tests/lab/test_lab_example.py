"""The committed example is what today's code reads and writes."""

from pathlib import Path

from paceline.lab.results import read_ablation
from paceline.lab.text import markdown

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ablation"


def test_the_committed_example_is_a_whole_ablation_of_five_features() -> None:
    ablation = read_ablation(EXAMPLE)
    assert ablation.status == "complete" and ablation.replayed
    assert len([row for row in ablation.rows if len(row.features) == 1]) == 5
    assert all(row.num_pairs == ablation.num_pairs and row.num_failed == 0 for row in ablation.rows)
    assert {row.correctness.status for row in ablation.rows} == {"passed"}


def test_the_committed_table_is_that_of_the_record() -> None:
    assert (EXAMPLE / "ablation.md").read_text(encoding="utf-8") == markdown(read_ablation(EXAMPLE))
