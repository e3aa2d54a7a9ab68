"""From one command to many ranks: who starts them, where each one is, and how a failing one ends the run."""

from paceline.launch.placement import Placement, find_placement
from paceline.launch.reports import RankReport, write_report

__all__ = ["Placement", "RankReport", "find_placement", "write_report"]
