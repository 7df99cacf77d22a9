"""Measurements of speed, memory and agreement, each a module of its own: README.md has them."""
