"""LAMBADA and ARC-Easy read from local files."""
