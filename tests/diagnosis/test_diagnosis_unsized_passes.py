"""Micro-batches whose sizes were not recorded tell nothing of what a size costs."""

from paceline.diagnosis.estimates import fit_passes


def test_passes_without_a_size_are_not_separable():
    found = fit_passes([0] * 40, [0.5 + 0.01 * (index % 7) for index in range(40)])
    assert found is not None and not found.is_separable


def test_passes_of_one_size_are_not_separable():
    found = fit_passes([64] * 40, [0.5] * 40)
    assert found is not None and not found.is_separable
