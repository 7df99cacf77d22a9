"""Persistent CUDA kernels of the exact solve: one launch per layer and direction."""
