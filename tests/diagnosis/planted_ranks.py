"""One rank of a process group of two: trains runs one after the other, with a slow rank or a throttled link in them.

`planted_ranks.py FOLDER NAME=PORT ...` trains FOLDER/NAME.yaml with what NAME stands for, and writes what it planted to
FOLDER/NAME.rank{r}.json.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from planted_runs import Clock
from pytest import MonkeyPatch

from paceline.cli import main
from paceline.model.loading import CausalModel

HIDDEN_NAP_S = 0.05
BYTES_PER_S = 2.5e6
LATENCY_S = 0.04


def slow_rank(clock: Clock, patched: MonkeyPatch) -> None:
    """Rank 1 takes longer for every pass of the model."""
    if os.environ["RANK"] == "0":
        return
    hidden = CausalModel.hidden

    def slow(*args: Any) -> torch.Tensor:
        clock.nap(HIDDEN_NAP_S)
        return hidden(*args)

    patched.setattr(CausalModel, "hidden", slow)


def slow_link(clock: Clock, patched: MonkeyPatch) -> None:
    """Every exchange of tensors takes as long as a link of so many bytes per second would, on both ranks."""

    def throttle(name: str, size_of: Callable[..., torch.Tensor]) -> None:
        original = getattr(dist, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            moved = size_of(*args)
            done = original(*args, **kwargs)
            clock.nap(LATENCY_S + moved.numel() * moved.element_size() / BYTES_PER_S)
            return done

        patched.setattr(dist, name, slow)

    throttle("all_gather_into_tensor", lambda output, *_: output)
    throttle("reduce_scatter_tensor", lambda _, moved, *__: moved)


PLANTS = {"slow_rank": slow_rank, "slow_link": slow_link}


def run(folder: Path, name: str, port: str) -> None:
    """Trains one of the runs."""
    os.environ["MASTER_PORT"] = port
    with MonkeyPatch.context() as patched:
        clock = Clock().follow(patched)
        PLANTS[name](clock, patched)
        if main(["train", str(folder / f"{name}.yaml")]) != 0:
            sys.exit(1)
    (folder / f"{name}.rank{os.environ['RANK']}.json").write_text(json.dumps({"per_step": clock.per_step()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[2:]:
        run(Path(sys.argv[1]), *argument.split("="))
