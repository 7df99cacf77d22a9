"""mamba-ssm's kernels, where that package is installed."""
