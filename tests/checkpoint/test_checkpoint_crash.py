"""A loadable checkpoint exists at every instant: the writer is killed at every boundary and at random moments."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import CheckpointStore

# One interpreter imports torch once; each case is a forked child that saves and is killed at its boundary.
_KILLED_AT_A_BOUNDARY = """
import json, os, sys
from pathlib import Path
import torch
from paceline.checkpoint import CheckpointStore
torch.set_num_threads(1)

def tensors(step):
    return {"weights": {"w": torch.full((8,), float(step))}, "moments": {"m": torch.full((8,), step / 2)}}

def save_all(directory, keep, steps, kill_at):
    events = []
    def after_write(event):
        events.append(event)
        if len(events) - 1 == kill_at:
            os._exit(9)
    store = CheckpointStore(directory, keep, after_write=after_write)
    for step in steps:
        store.save(step, tensors(step), {"step": step}, asynchronous=True)
    store.wait()
    return events

all_events = []
for case, (keep, steps) in enumerate(json.loads(sys.argv[2])):
    root = Path(sys.argv[1]) / str(case)
    events = save_all(root / "unbroken", keep, steps, None)
    all_events.append(events)
    for kill_at in range(len(events)):
        child = os.fork()
        if child == 0:
            save_all(root / str(kill_at), keep, steps, kill_at)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
print(json.dumps(all_events))
"""


def run_python(code: str, *args: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CASES = [(1, [1, 2, 3]), (2, [1, 2, 3]), (1, [1, 1])]
"""(keep, steps saved one after the other); the last saves a step again."""


@pytest.fixture(scope="module")
def killed_stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """Folder of the stores by case and boundary, and each case's boundaries."""
    root = tmp_path_factory.mktemp("killed")
    return root, json.loads(run_python(_KILLED_AT_A_BOUNDARY, str(root), json.dumps(CASES)))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_killed_at_every_boundary_a_checkpoint_loads_and_the_next_save_clears_up(
    killed_stores: tuple[Path, list[list[str]]], case: int
) -> None:
    (keep, steps), root, events = CASES[case], killed_stores[0] / str(case), killed_stores[1][case]
    assert len(events) > 10
    num_complete = 0
    for index, event in enumerate(events):
        num_complete += event == "COMPLETE"
        store = CheckpointStore(root / str(index), keep)
        found = store.latest()
        if not num_complete:
            assert found is None
            continue
        assert found is not None, (index, event)
        assert found.step == steps[num_complete - 1]
        loaded = store.load(found.path)
        assert loaded.state == {"step": found.step}
        assert torch.equal(loaded.tensors["weights"]["w"], torch.full((8,), float(found.step)))
        is_partial = event in ("weights.safetensors", "moments.safetensors", "state.json")
        if is_partial and steps[num_complete] > found.step:
            [(path, reason)] = found.skipped
            assert path.name.startswith(f"step_{steps[num_complete]}.tmp-") and "did not finish" in reason
        store.save(10, {"weights": {"w": torch.zeros(1)}}, {}, asynchronous=False)
        remaining = sorted(path.name for path in store.directory.iterdir())
        assert len(remaining) <= keep and "step_10" in remaining and "." not in "".join(remaining), remaining
        if keep == 1:
            assert remaining == ["step_10"]


_KILLED_AT_ANY_MOMENT = """
import itertools, os, signal, sys, time
from pathlib import Path
import torch
from paceline.checkpoint import CheckpointStore
torch.set_num_threads(1)

def save_for_ever(directory, ready):
    store = CheckpointStore(directory, keep=1)
    for step in itertools.count(1):
        store.save(step, {"weights": {"w": torch.full((50_000,), float(step))}}, {"step": step}, asynchronous=True)
        if step == 2:
            os.write(ready, b"r")

for round_index in range(12):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        save_for_ever(Path(sys.argv[1]) / str(round_index), writer)
    os.read(reader, 1)
    time.sleep(0.0037 * round_index)  # a save takes a few milliseconds: every round hits another moment of one
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_killed_by_sigkill_at_arbitrary_moments_a_checkpoint_loads(tmp_path: Path) -> None:
    run_python(_KILLED_AT_ANY_MOMENT, str(tmp_path))
    for directory in tmp_path.iterdir():
        store = CheckpointStore(directory, keep=1)
        found = store.latest()
        assert found is not None and found.step >= 1
        loaded = store.load(found.path)
        assert loaded.state == {"step": found.step}
        assert bool((loaded.tensors["weights"]["w"] == found.step).all())
        store.save(found.step + 2, {}, {}, asynchronous=False)
        assert [path.name for path in directory.iterdir()] == [f"step_{found.step + 2}"]


_DISK_FULL = """
import resource, signal, sys
import torch
from paceline.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1], keep=1)
store.save(1, {"weights": {"w": torch.zeros(10)}}, {}, asynchronous=False)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store.save(2, {"small": {"w": torch.zeros(10)}, "weights": {"w": torch.zeros(100_000)}}, {}, asynchronous=True)
try:
    store.wait()
except Exception as error:
    print("failed:", error)
"""


@pytest.mark.skipif(
    not hasattr(resource, "RLIMIT_FSIZE"), reason="the limit that stands for a full disk is POSIX"
)
def test_a_write_that_runs_out_of_space_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    assert "failed:" in run_python(_DISK_FULL, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    found = CheckpointStore(tmp_path, keep=1).latest()
    assert found is not None and found.step == 1


def test_a_folder_of_a_living_writer_is_not_cleared(tmp_path: Path) -> None:
    living = tmp_path / f"step_7.tmp-{os.getppid()}"
    living.mkdir()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f"step_8.tmp-{dead.pid}").mkdir()
    CheckpointStore(tmp_path, keep=1).save(9, {}, {}, asynchronous=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [living.name, "step_9"]


def test_a_folder_older_than_the_process_of_its_id_is_cleared(tmp_path: Path) -> None:
    # after a restart in a container the ids repeat, so the same number means another process
    stale = tmp_path / f"step_7.tmp-{os.getppid()}"
    stale.mkdir()
    os.utime(stale, (1, 1))
    CheckpointStore(tmp_path, keep=1).save(9, {}, {}, asynchronous=False)
    assert [path.name for path in tmp_path.iterdir()] == ["step_9"]
