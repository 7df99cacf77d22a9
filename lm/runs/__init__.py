"""Files of a run: its directory, checkpoints, log and status."""
