"""Rewards that a model gives: sequence classifiers and judges."""
