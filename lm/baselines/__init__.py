"""Baselines behind the same config, training and export as the fixed-point models."""
