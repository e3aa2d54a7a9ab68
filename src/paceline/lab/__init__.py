"""Ablations: a baseline and its features in paired runs, compared with intervals and set against predictions."""
