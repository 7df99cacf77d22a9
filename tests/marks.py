"""Marks of single cases."""

import pytest


def slow(*values):
    """A case of a parametrized test that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
