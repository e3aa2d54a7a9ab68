"""What every importer fills and writes: an imported run in our record schema."""

from paceline.adapters.run.imported import ImportedRun, ImportedStep, StageTime
from paceline.adapters.run.writing import write_run

__all__ = ["ImportedRun", "ImportedStep", "StageTime", "write_run"]
