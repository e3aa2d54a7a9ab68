"""A file is replaced whole, and an attempt that fails leaves what was there and nothing beside it."""

from pathlib import Path

import pytest

from paceline.files import write_whole


def test_a_file_is_replaced_and_nothing_else_is_left_in_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_whole(path, "first")
    write_whole(path, "第二")
    assert path.read_text(encoding="utf-8") == "第二"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_half_way_leaves_the_earlier_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figures.json"
    write_whole(path, "earlier")
    written = Path.write_text

    def write_half(draft: Path, text: str, encoding: str) -> int:
        written(draft, text[: len(text) // 2], encoding=encoding)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "what is new")
    assert path.read_text(encoding="utf-8") == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_move_that_fails_leaves_no_draft(tmp_path: Path) -> None:
    folder = tmp_path / "figures.json"
    (folder / "kept").mkdir(parents=True)  # a folder is no file to be replaced
    with pytest.raises(OSError):
        write_whole(folder, "text")
    assert list(tmp_path.iterdir()) == [folder]
