"""Helpers that every package may use: errors, console, files, ranks, signals, HTML pages."""
