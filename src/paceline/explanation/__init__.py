"""A run in half a page of plain words, for an engineer or a manager, in English or Chinese. Torch-free."""

from paceline.explanation.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
