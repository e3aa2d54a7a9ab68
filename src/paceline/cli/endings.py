"""How a command ends: its exit code, and what stands on the last lines of standard error."""

import os
import sys
import traceback
from collections.abc import Sequence

from paceline.config import ConfigError
from paceline.launch.placement import Placement, find_placement
from paceline.launch.reports import write_report

DONE, FAILED, REFUSED = 0, 1, 2

_WORDS = {
    "en": {"refused": "refused: ", "failed": "failed: ", "cause": "caused by: ", "rank": "rank {rank}: "},
    "zh": {"refused": "已拒绝：", "failed": "失败：", "cause": "起因：", "rank": "进程 {rank}："},
}


def asked_language(arguments: Sequence[str]) -> str:
    """The language that a command line asks its last lines in: that of `--lang` if it is known, else English."""
    found = "en"
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == "--lang":
            found = following
        elif argument.startswith("--lang="):
            found = argument.removeprefix("--lang=")
    return found if found in _WORDS else "en"


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


def _told_launcher(error: Exception, placement: Placement | None) -> bool:
    """Writes the rank's report, if this is one. False where a full disk takes none: the rank then speaks for itself."""
    try:
        if placement is not None:
            write_report(error, placement)
    except OSError as unwritten:
        print(f"the launcher could not be told: {unwritten}", file=sys.stderr)
        return False
    return True


def refusal(error: ConfigError, placement: Placement | None, lang: str = "en") -> int:
    """Says what is refused, once per node."""
    if not _told_launcher(error, placement) or speaks_for_the_run(placement):
        for problem in error.problems:
            print(f"{_WORDS[lang]['refused']}{problem.line_in(lang)}", file=sys.stderr)
    return REFUSED


def failure(error: Exception, placement: Placement | None, lang: str = "en") -> int:
    """Says what failed, and on which rank.

    A rank that paceline started tells its launcher, which shows the failure that came first, below all else.
    """
    if _told_launcher(error, placement) and placement is not None and placement.launcher == "paceline":
        return FAILED
    words = _WORDS[lang]
    where = "" if placement is None else words["rank"].format(rank=placement.rank)
    traceback.print_exception(error)
    cause = error
    while isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    if cause is not error:
        print(f"{words['cause']}{type(cause).__name__}: {cause}", file=sys.stderr)
    print(f"{words['failed']}{where}{type(error).__name__}: {error}", file=sys.stderr)
    return FAILED
