"""Marks for single cases of parametrized tests."""

import pytest


def slow(*values):
    """Return a parametrized case that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
