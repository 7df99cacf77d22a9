"""Command line `fprnn`: one module for each command, and `main`, which puts them together."""
