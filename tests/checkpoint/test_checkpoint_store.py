"""What is saved comes back bit by bit; what is incomplete, damaged or foreign is passed over with the reason."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint import (
    CheckpointError,
    CheckpointStore,
    CorruptCheckpointError,
    NonFiniteStateError,
)


def groups(value: float = 1.0) -> dict[str, dict[str, Tensor]]:
    return {
        "weights": {"a": torch.full((4, 3), value, dtype=torch.bfloat16), "b": torch.arange(5.0)},
        "moments": {"a.exp_avg": torch.full((4, 3), value / 3)},
    }


def saved(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, groups(float(step)), {"step": step}, asynchronous=False)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_tensors_and_state_come_back_bit_equal(tmp_path: Path, asynchronous: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "weights": {
            dtype.__repr__(): torch.randn(7, 3, generator=generator).to(dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        },
        "rng": {"torch": torch.get_rng_state(), "empty": torch.zeros(0, 4), "scalar": torch.tensor(3)},
    }
    state = {
        "lr": 6.000000000000001e-07,
        "seeds": [2**63 + 1, 0],
        "nested": {"none": None, "text": "ü", "flag": True},
    }
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.save(40, tensors, state, asynchronous=asynchronous)
    store.wait()
    found = store.latest()
    assert found is not None and (found.step, found.skipped) == (40, ())
    checkpoint = store.load(found.path)
    loaded = checkpoint.tensors
    assert checkpoint.state == state
    assert {group: set(named) for group, named in loaded.items()} == {g: set(n) for g, n in tensors.items()}
    for group, named in tensors.items():
        for name, tensor in named.items():
            assert loaded[group][name].dtype == tensor.dtype
            assert torch.equal(loaded[group][name], tensor)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1), st.integers(0, 2**64))
@settings(max_examples=20, deadline=None)
def test_every_number_of_the_state_survives(
    tmp_path_factory: pytest.TempPathFactory, floats: list[float], big: int
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("store"), keep=1)
    store.save(1, {}, {"floats": floats, "big": big}, asynchronous=False)
    assert store.load(store.directory / "step_1").state == {"floats": floats, "big": big}


def test_what_changes_after_save_returns_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    go_on = threading.Event()

    def hold(event: str) -> None:
        assert go_on.wait(10)

    store = CheckpointStore(tmp_path, keep=1, after_write=hold)
    tensors, state = groups(1.0), {"counters": [1]}
    store.save(1, tensors, state, asynchronous=True)
    tensors["weights"]["a"].fill_(9.0)
    state["counters"].append(2)
    go_on.set()
    store.wait()
    loaded = store.load(tmp_path / "step_1")
    assert loaded.state == {"counters": [1]} and torch.equal(
        loaded.tensors["weights"]["a"], groups(1.0)["weights"]["a"]
    )


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    embedding = torch.randn(1000, 64)
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"weights": {"embed": embedding, "head": embedding}}, {}, asynchronous=False)
    assert (tmp_path / "step_1/weights.safetensors").stat().st_size < 1.1 * embedding.nbytes
    weights = store.load(tmp_path / "step_1").tensors["weights"]
    assert (
        torch.equal(weights["head"], embedding) and weights["head"].data_ptr() == weights["embed"].data_ptr()
    )


def test_views_of_one_memory_with_other_shapes_are_stored_apart(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"weights": {"w": base, "transposed": base.T, "row": base[0]}}, {}, asynchronous=False)
    weights = store.load(tmp_path / "step_1").tensors["weights"]
    assert torch.equal(weights["transposed"], base.T) and torch.equal(weights["row"], base[0])


def test_a_second_save_waits_for_the_first_and_counts_it(tmp_path: Path) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def hold(event: str) -> None:
        writing.set()
        assert go_on.wait(10)

    store = CheckpointStore(tmp_path, keep=2, after_write=hold)
    store.save(1, groups(), {}, asynchronous=True)
    assert writing.wait(10) and store.num_waits == 0
    release = threading.Timer(0.05, go_on.set)
    release.start()
    assert store.save(2, groups(), {}, asynchronous=True) > 0.0
    store.wait()
    release.join()
    assert store.num_waits == 1 and names(tmp_path) == ["step_1", "step_2"]


def test_an_error_while_writing_is_raised_once_and_the_previous_checkpoint_stays(tmp_path: Path) -> None:
    def fail(event: str) -> None:
        if event == "state.json" and (tmp_path / "step_1").exists():
            raise OSError(28, "No space left on device")

    store = CheckpointStore(tmp_path, keep=1, after_write=fail)
    saved(store, 1)
    store.save(2, groups(), {}, asynchronous=True)
    with pytest.raises(OSError, match="No space left"):
        store.wait()
    store.wait()
    assert names(tmp_path) == ["step_1"]
    with pytest.raises(OSError, match="No space left"):
        saved(store, 3)
    store.save(4, groups(), {}, asynchronous=True)
    with pytest.raises(OSError, match="No space left"):
        saved(store, 5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("group", ["weights", "moments"])
def test_non_finite_tensors_never_replace_a_good_checkpoint(tmp_path: Path, group: str, bad: float) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    saved(store, 1)
    tensors = groups()
    next(iter(tensors[group].values()))[1, 2] = bad
    with pytest.raises(NonFiniteStateError, match=group):
        store.save(2, tensors, {}, asynchronous=True)
    store.wait()
    assert names(tmp_path) == ["step_1"]


def test_state_that_json_would_change_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(NonFiniteStateError, match=r"state\.rewards\[1\] is nan"):
        store.save(1, {}, {"rewards": [0.0, float("nan")]}, asynchronous=False)
    with pytest.raises(CheckpointError, match="key 3"):
        store.save(1, {}, {"counts": {3: 1}}, asynchronous=False)
    with pytest.raises(CheckpointError, match="Tensor"):
        store.save(1, {}, {"t": torch.zeros(1)}, asynchronous=False)
    with pytest.raises(CheckpointError, match="plain word"):
        store.save(1, {"../up": {}}, {}, asynchronous=False)
    assert names(tmp_path) == []


def test_retention_counts_complete_checkpoints_also_after_a_restart(tmp_path: Path) -> None:
    saved(CheckpointStore(tmp_path, keep=2), 1, 2, 3)
    assert names(tmp_path) == ["step_2", "step_3"]
    saved(CheckpointStore(tmp_path, keep=1), 10)
    assert names(tmp_path) == ["step_10"]


def test_foreign_entries_are_left_alone_and_links_are_unlinked_not_followed(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    elsewhere = tmp_path / "elsewhere"
    saved(CheckpointStore(elsewhere, keep=1), 1)
    directory.mkdir()
    (directory / "notes.txt").write_text("mine")
    (directory / "step_1").symlink_to(elsewhere / "step_1")
    saved(CheckpointStore(directory, keep=1), 2)
    assert names(directory) == ["notes.txt", "step_2"] and (elsewhere / "step_1/COMPLETE").exists()


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    saved(store, 5)
    store.save(5, groups(7.0), {"again": True}, asynchronous=False)
    assert names(tmp_path) == ["step_5"] and store.load(tmp_path / "step_5").state == {"again": True}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["weights.safetensors", "moments.safetensors", "state.json", "COMPLETE"])
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_damage_is_found_and_the_checkpoint_before_is_taken(
    tmp_path: Path, file: str, damage: object
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    saved(store, 1, 2)
    assert callable(damage)
    damage(tmp_path / "step_2" / file)
    found = store.latest()
    assert found is not None and found.step == 1
    [(path, reason)] = found.skipped
    assert path == tmp_path / "step_2" and file in reason
    with pytest.raises(CorruptCheckpointError):
        store.load(path)
    saved(CheckpointStore(tmp_path, keep=1), 2)
    assert names(tmp_path) == ["step_2"]


def test_a_damaged_later_checkpoint_does_not_push_out_the_one_just_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    saved(store, 1, 9)
    flip_a_bit(tmp_path / "step_9/weights.safetensors")
    saved(CheckpointStore(tmp_path, keep=1), 2)
    assert names(tmp_path) == ["step_2"]


def test_no_checkpoint_is_none_but_only_damaged_ones_are_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new", keep=1)
    assert store.latest() is None
    saved(store, 1)
    (store.directory / "step_1/state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_1: state\.json is missing"):
        store.latest()


def test_the_marker_lists_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    saved(CheckpointStore(tmp_path, keep=1), 1)
    marker = json.loads((tmp_path / "step_1/COMPLETE").read_text())
    assert set(marker["files"]) | {"COMPLETE"} == set(names(tmp_path / "step_1"))
    assert all(len(record["sha256"]) == 64 and record["num_bytes"] > 0 for record in marker["files"].values())
