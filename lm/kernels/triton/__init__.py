"""Kernels in Triton, for CUDA devices."""
