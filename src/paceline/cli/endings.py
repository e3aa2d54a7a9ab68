"""How a command ends: its exit code, and what stands on the last lines of standard error."""

import os
import sys
import traceback

from paceline.config import ConfigError
from paceline.launch.placement import Placement, find_placement
from paceline.launch.reports import write_report

DONE, FAILED, REFUSED = 0, 1, 2


def own_placement() -> Placement | None:
    """This process's rank, None for a process alone or a launcher's variables that are themselves the problem."""
    try:
        return find_placement(os.environ)
    except ConfigError:
        return None


def speaks_for_the_run(placement: Placement | None) -> bool:
    """Whether this process tells a person what holds for all ranks: a process alone, or one rank of a node.

    Ranks that paceline started leave it to the process that started them.
    """
    return placement is None or (placement.launcher != "paceline" and placement.local_rank == 0)


def refusal(error: ConfigError, placement: Placement | None) -> int:
    """Says what is refused, once per node."""
    if placement is not None:
        write_report(error, placement)
    if speaks_for_the_run(placement):
        for problem in error.problems:
            print(f"refused: {problem.line}", file=sys.stderr)
    return REFUSED


def failure(error: Exception, placement: Placement | None) -> int:
    """Says what failed, and on which rank.

    A rank that paceline started tells its launcher, which shows the failure that came first, below all else.
    """
    if placement is not None:
        write_report(error, placement)
        if placement.launcher == "paceline":
            return FAILED
    where = "" if placement is None else f"rank {placement.rank}: "
    traceback.print_exception(error)
    cause = error
    while isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    if cause is not error:
        print(f"caused by: {type(cause).__name__}: {cause}", file=sys.stderr)
    print(f"failed: {where}{type(error).__name__}: {error}", file=sys.stderr)
    return FAILED
