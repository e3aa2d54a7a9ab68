"""What a rank says itself where it cannot tell its launcher."""

from pathlib import Path

import pytest

from paceline.cli.endings import failure, refusal
from paceline.config import ConfigError
from paceline.launch.placement import REPORTS_VARIABLE, find_placement

RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29400",
}


@pytest.mark.parametrize("is_told", [True, False])
def test_a_rank_that_cannot_report_to_its_launcher_speaks_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_told: bool
) -> None:
    folder = tmp_path if is_told else tmp_path / "nowhere"
    monkeypatch.setenv(REPORTS_VARIABLE, str(folder))
    placement = find_placement({**RANK, REPORTS_VARIABLE: str(folder)})
    assert placement is not None and placement.launcher == "paceline"
    assert refusal(ConfigError("model.path", "x", "is no model"), placement) == 2
    assert failure(RuntimeError("the loss diverged"), placement) == 1
    said = capsys.readouterr().err
    assert ("refused: model.path = 'x': is no model" in said) is not is_told
    assert ("failed: rank 1: RuntimeError: the loss diverged" in said) is not is_told
    assert said.count("the launcher could not be told") == (0 if is_told else 2)
