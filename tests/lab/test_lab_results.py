"""The ablation's record."""

import json
from pathlib import Path

import pytest
from ablation_cases import example_ablation

from paceline.lab.results import ABLATION_FILE, read_ablation, write_ablation


def test_an_ablation_reads_back_as_it_was_written(tmp_path: Path) -> None:
    ablation = example_ablation()
    path = write_ablation(tmp_path, ablation)
    assert read_ablation(tmp_path) == ablation
    assert read_ablation(path) == ablation


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    write_ablation(tmp_path, example_ablation())
    record = json.loads((tmp_path / ABLATION_FILE).read_text())
    (tmp_path / ABLATION_FILE).write_text(json.dumps({**record, "v": 99}))
    with pytest.raises(ValueError, match="version 99"):
        read_ablation(tmp_path)


def test_a_folder_without_an_ablation_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_ablation(tmp_path)
