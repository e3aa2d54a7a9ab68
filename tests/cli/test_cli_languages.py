"""What a command refuses with `--lang zh`."""

import ast
from pathlib import Path

import pytest

import paceline
from paceline.cli import main
from paceline.cli.endings import asked_language, failure
from paceline.config import ConfigError

SOURCE = Path(paceline.__file__).parent
RAISED_WITH_LANG = [
    *(SOURCE / "diagnosis").glob("*.py"),
    *(SOURCE / "explanation").glob("*.py"),
    *(SOURCE / "report").glob("*.py"),
    SOURCE / "monitor" / "following.py",
    *(SOURCE / "cli" / f"{name}.py" for name in ("runs", "diagnose", "report", "explain", "watch")),
]


def test_refusals_are_in_the_language_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    for command in ("diagnose", "report", "explain", "watch"):
        assert main([command, missing, "--lang", "zh"]) == 2
        assert capsys.readouterr().err == f"已拒绝：run = '{missing}'：没有这个文件夹\n"
        assert main([command, missing]) == 2
        assert capsys.readouterr().err == f"refused: run = '{missing}': there is no such folder\n"


def test_the_nearest_valid_value_is_named_in_chinese(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path), "--interval", "0", "--lang=zh"]) == 2
    assert capsys.readouterr().err == "已拒绝：--interval = 0.0：须大于 0（最接近的有效值：1）\n"


def test_a_language_that_is_none_is_refused_in_english(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path), "--lang", "de"]) == 2
    assert capsys.readouterr().err == "refused: --lang = 'de': must be one of en, zh (nearest: en)\n"


@pytest.mark.parametrize(
    ("arguments", "language"),
    [
        ([], "en"),
        (["--lang"], "en"),
        (["--lang", "zh"], "zh"),
        (["--lang=zh", "run"], "zh"),
        (["--lang", "de"], "en"),
    ],
)
def test_the_last_lines_know_the_language_before_anything_is_parsed(
    arguments: list[str], language: str
) -> None:
    assert asked_language(["report", "run", *arguments]) == language


def test_a_failure_has_its_frame_in_chinese_and_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(ValueError("a record of version 9"), None, "zh") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "失败：ValueError: a record of version 9"


def test_a_rule_without_chinese_stays_english() -> None:
    problem = ConfigError("a", 1, "must be 2", "2")
    assert problem.line_in("zh") == "a = 1：must be 2（最接近的有效值：2）"
    assert ConfigError.join([ConfigError("a", 1, "no", zh="否"), problem]).zh == "否"


def test_every_rule_that_commands_with_a_language_raise_is_in_both() -> None:
    """Read from the source: whoever adds a refusal there adds its Chinese."""
    calls = [
        (path, node)
        for path in RAISED_WITH_LANG
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ConfigError"
    ]
    assert len(calls) > 10
    lacking = [
        f"{path.name}:{node.lineno}"
        for path, node in calls
        if "zh" not in {word.arg for word in node.keywords}
    ]
    assert not lacking
