"""Files that are there whole or not at all."""

from paceline.files.whole import write_whole

__all__ = ["write_whole"]
