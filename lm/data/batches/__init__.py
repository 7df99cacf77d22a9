"""Tokens as micro-batches: packing, shuffling, streams, mixtures."""
