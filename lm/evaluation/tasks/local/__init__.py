"""Perplexity of plain text in local files."""
