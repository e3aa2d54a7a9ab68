"""The Markdown tables."""

from dataclasses import replace

from ablation_cases import example_ablation

from paceline.lab.text import markdown


def test_every_arm_has_a_row_with_as_many_cells_as_the_header() -> None:
    text = markdown(example_ablation())
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert tables[0].count("`shared_prompts`") == 1 and "[0.700, 0.800]" in tables[0]
    assert "0.900 [0.600, 1.100]" in tables[0]  # predicted beside measured
    assert "refused: train.lr" in text


def test_a_table_of_unfinished_runs_says_so() -> None:
    assert "Not all runs are done" in markdown(replace(example_ablation(), status="running"))
    assert "Not all runs are done" not in markdown(example_ablation())
