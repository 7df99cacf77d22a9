"""LAMBADA, ARC-Easy and plain text read from local files."""
