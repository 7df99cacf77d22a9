"""Inspection of a model on one sequence: measurements, HTML page and terminal output."""
