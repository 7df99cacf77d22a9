"""Kernels of mamba-ssm and causal-conv1d, which are used if these packages are installed."""
