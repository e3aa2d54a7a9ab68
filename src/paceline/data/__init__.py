"""Prompts, tasks, the resumable loader and the seed tree. Torch-free."""
