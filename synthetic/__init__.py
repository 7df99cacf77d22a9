"""Validation suite: synthetic tasks for expressive sequence mixers."""
