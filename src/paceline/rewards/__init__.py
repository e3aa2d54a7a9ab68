"""Completion to score, in killable workers. Torch-free."""
