"""Configuration files: schema, loading, overrides, sweeps, and rules for resumed runs."""
