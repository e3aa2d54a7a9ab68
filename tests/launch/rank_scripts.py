"""What the ranks of test_launch_ranks do; run as `python -m rank_scripts NAME`."""

import os
import signal
import sys
import time

from paceline.cli.endings import failure, own_placement, refusal
from paceline.config import ConfigError
from paceline.launch.stage_board import open_board

RANK = int(os.environ["RANK"])


def finish() -> None:
    pass


def fail_on_rank_1() -> None:
    if RANK == 1:
        try:
            raise OSError("the disk")
        except OSError as error:
            raise KeyError("the cause") from error
    time.sleep(60)  # a rank that would go on if nobody ended it


def kill_rank_2_while_others_wait() -> None:
    show = open_board(own_placement())
    assert show is not None
    show("data")
    show("rollout")
    if RANK == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def refuse() -> None:
    raise ConfigError("train.lr", -1.0, "must be positive", "0.0")


def wait_for_sigterm() -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    print("ready", flush=True)
    while not asked:
        time.sleep(0.05)
    time.sleep(0.3)
    print(f"asked {asked}", flush=True)


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]]()
    except ConfigError as error:
        sys.exit(refusal(error, own_placement()))
    except Exception as error:  # as the command line does
        sys.exit(failure(error, own_placement()))
