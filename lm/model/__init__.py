"""The model. Flat on purpose: an exported checkpoint carries these files."""
