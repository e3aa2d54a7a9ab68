"""The command line: parse, then import lazily and dispatch."""

from paceline.cli.app import main

__all__ = ["main"]
