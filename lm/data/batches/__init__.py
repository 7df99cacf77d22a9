"""Micro-batches of tokens: packing, shuffling, streams, mixtures."""
