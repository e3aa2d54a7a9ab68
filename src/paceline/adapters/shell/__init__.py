"""Reads a shell script without running it: which commands it would start, with which arguments and environment."""

from paceline.adapters.shell.runner import Command, ShellResult, read_script
from paceline.adapters.shell.syntax import ShellSyntaxError

__all__ = ["Command", "ShellResult", "ShellSyntaxError", "read_script"]
