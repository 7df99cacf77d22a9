"""mamba-ssm's and causal-conv1d's kernels, where these packages are installed."""
