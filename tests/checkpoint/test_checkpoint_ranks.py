"""Checkpoints of several ranks: each part written once, loadable on any other number, complete or not there."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_group import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from paceline.checkpoint import CheckpointError, CheckpointStore, Held, NonFiniteStateError, Piece
from paceline.checkpoint.writing import announce, await_others, read_others
from paceline.engine.shards import local_part, offsets_of


@dataclass
class GroupRanks:
    """The ranks of a process group, as a store knows them."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    def gather_objects(self, value):
        found = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found


def whole_tensors(scale: float = 1.0) -> dict[str, dict[str, Tensor]]:
    """Sizes that 2, 4 and 8 ranks do not all divide, a vector, a scalar and a tensor shorter than the ranks."""
    generator = torch.Generator().manual_seed(3)
    masters = {
        "embed": scale * torch.randn(13, 6, generator=generator),
        "norm": scale * torch.randn(6, generator=generator),
        "narrow": scale * torch.randn(3, 5, generator=generator),
    }
    moments = {f"{n}.exp_avg": t / 3 for n, t in masters.items()} | {"scalar": torch.tensor(2.5 * scale)}
    return {"masters": masters, "moments": moments}


def spread(mesh: DeviceMesh, tensors: dict[str, dict[str, Tensor]], placements) -> dict[str, dict[str, Held]]:
    """Every tensor of one dim or more in pieces; the scalar stays whole on every rank."""
    return {
        group: {
            name: piece(distribute_tensor(t, mesh, placements(t))) if t.dim() else t
            for name, t in named.items()
        }
        for group, named in tensors.items()
    }


def by_rows(tensor: Tensor):
    return [Shard(0)]


def rows_and_columns(tensor: Tensor):
    """FSDP over rows in two replicas of a tensor-parallel pair, which has the columns of matrices."""
    return [Replicate(), Shard(0), Shard(1) if tensor.dim() == 2 else Replicate()]


def local(held: Held) -> Tensor:
    return held.local if isinstance(held, Piece) else held


def piece(tensor: Tensor) -> Piece:
    """This rank's part of a DTensor, by the engine's own arithmetic of cuts."""
    return Piece(local_part(tensor), tuple(tensor.shape), offsets_of(tensor))


def save_on_four_and_load_on_others(folder: str) -> None:
    rank = dist.get_rank()
    groups = {size: dist.new_group(list(range(size))) for size in (2, 4, 8)}
    shapes = {2: (2,), 4: (4,), 8: (2, 2, 2)}
    meshes = {
        size: DeviceMesh("cpu", torch.arange(size).reshape(shape)) for size, shape in shapes.items()
    }  # every rank makes them all, whether it is in one or not
    tensors = whole_tensors()
    if rank < 4:
        store = CheckpointStore(folder, keep=1, ranks=GroupRanks(groups[4]))
        store.save(40, spread(meshes[4], tensors, by_rows), {"step": 40}, asynchronous=True)
        store.wait()
    dist.barrier()
    for size, group in groups.items():
        if rank >= size:
            continue
        placements = rows_and_columns if size == 8 else by_rows
        targets = spread(meshes[size], whole_tensors(9.0), placements)
        store = CheckpointStore(folder, keep=1, ranks=GroupRanks(group))
        found = store.latest()
        assert found is not None and found.step == 40
        loaded = store.load(found.path)
        for name_of_group, named in spread(meshes[size], tensors, placements).items():
            parts = loaded.like(name_of_group, targets[name_of_group])
            for name, expected in named.items():
                assert torch.equal(parts[name], local(expected)), (size, name)


def test_saved_on_four_ranks_it_loads_bit_equal_on_four_two_eight_and_one(tmp_path: Path) -> None:
    run_ranks(8, save_on_four_and_load_on_others, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step_40"]
    store = CheckpointStore(tmp_path, keep=1)
    loaded = store.load(tmp_path / "step_40")
    assert loaded.state == {"step": 40} and loaded.manifest.world_size == 4
    for group, named in whole_tensors().items():
        assert set(loaded.tensors[group]) == set(named)
        for name, tensor in named.items():
            assert torch.equal(loaded.tensors[group][name], tensor)
            assert torch.equal(loaded.like(group, {name: torch.zeros_like(tensor)})[name], tensor)
    stored = sum(path.stat().st_size for path in (tmp_path / "step_40").glob("*.safetensors"))
    assert stored < 3 * sum(t.nbytes for named in whole_tensors().values() for t in named.values())


def test_saved_by_one_process_it_loads_on_two_ranks(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, keep=1).save(7, whole_tensors(), {"step": 7}, asynchronous=False)
    run_ranks(2, load_on_two, str(tmp_path))


def load_on_two(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    store = CheckpointStore(folder, keep=1, ranks=GroupRanks(dist.group.WORLD))
    found = store.latest()
    assert found is not None
    expected = spread(mesh, whole_tensors(), by_rows)
    for group, named in spread(mesh, whole_tensors(5.0), by_rows).items():
        for name, part in store.load(found.path).like(group, named).items():
            assert torch.equal(part, local(expected[group][name]))


def fail_in_turn(folder: str) -> list[str]:
    """Retention over several saves, then every way in which one rank alone can spoil a save."""
    mesh, ranks = init_device_mesh("cpu", (3,)), GroupRanks(dist.group.WORLD)
    store = CheckpointStore(folder, keep=2, ranks=ranks)
    for step in (1, 2, 3):
        store.save(step, spread(mesh, whole_tensors(step), by_rows), {"step": step}, asynchronous=True)
    store.wait()
    dist.barrier()
    said = [",".join(sorted(os.listdir(folder)))]

    bad = spread(mesh, whole_tensors(), by_rows)
    if ranks.rank == 2:
        local(bad["masters"]["embed"])[0, 0] = float("nan")
    with pytest.raises(NonFiniteStateError) as caught:
        store.save(4, bad, {}, asynchronous=True)
    said.append(str(caught.value))

    alone = {"masters": {"w": torch.full((2,), float(ranks.rank == 1))}}
    with pytest.raises(CheckpointError, match=r"masters/w differs between ranks 0 and 1") as caught:
        store.save(4, alone, {}, asynchronous=True)

    def full_disk(event: str) -> None:
        if ranks.rank == 1:
            raise OSError(28, "No space left on device")
        if ranks.rank == 2:  # still writing when rank 1 has failed: until it is done, its folder must stay
            while list(Path(folder).glob("step_4.tmp-*")) and not list(
                Path(folder).glob("step_4.tmp-*/rank1.failed")
            ):
                time.sleep(0.001)  # another process makes the file; nothing tells of it
            time.sleep(0.2)  # long enough for rank 0 to see it and to remove the folder, if it would

    failing = CheckpointStore(folder, keep=2, ranks=ranks, after_write=full_disk)
    with pytest.raises((CheckpointError, OSError), match="No space left") as caught:
        failing.save(4, spread(mesh, whole_tensors(), by_rows), {}, asynchronous=False)
    said.append(str(caught.value))
    dist.barrier()
    said.append(",".join(sorted(os.listdir(folder))))
    return said


def test_a_save_that_one_rank_spoils_is_refused_on_all_and_the_ones_before_stay(tmp_path: Path) -> None:
    said = run_ranks(3, fail_in_turn, str(tmp_path))
    for rank, (kept, non_finite, disk, left) in enumerate(said):
        assert kept == left == "step_2,step_3"
        assert "masters/embed holds NaN" in non_finite
        assert ("rank 2: " in non_finite) == (rank != 2)
        assert "No space left on device" in disk
        assert ("rank 1 could not write its part" in disk) == (rank != 1)


def die_while_writing(folder: str) -> str:
    mesh, ranks = init_device_mesh("cpu", (2,)), GroupRanks(dist.group.WORLD)
    store = CheckpointStore(folder, keep=1, ranks=ranks)
    store.save(1, spread(mesh, whole_tensors(), by_rows), {"step": 1}, asynchronous=False)

    slow = CheckpointStore(folder, keep=1, ranks=ranks, others_timeout_s=1.0)
    if ranks.rank == 1:
        slow._write_part = lambda partial, snapshot: None  # type: ignore[method-assign]  # as if killed meanwhile
    try:
        slow.save(2, spread(mesh, whole_tensors(2.0), by_rows), {"step": 2}, asynchronous=False)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_rank_that_never_finishes_is_named_within_the_limit_and_leaves_the_one_before(
    tmp_path: Path,
) -> None:
    said = run_ranks(2, die_while_writing, str(tmp_path))
    assert said[0] == "ranks [1] have not written their parts within 1 s"
    assert said[1] == f"rank 0: {said[0]}"
    assert os.listdir(tmp_path) == ["step_1"]
    found = CheckpointStore(tmp_path, keep=1).latest()
    assert found is not None and found.step == 1


def test_a_disk_too_full_for_a_reason_still_tells_that_a_rank_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, encoding: str) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:  # no disk of a test's own can be filled
        patched.setattr(Path, "write_text", full)
        announce(tmp_path, 1, None, "OSError: No space left on device")
    assert await_others(tmp_path, 2, timeout_s=0.0) == []
    with pytest.raises(CheckpointError, match="rank 1 could not write its part"):
        read_others(tmp_path, 2, [], 0.0)
