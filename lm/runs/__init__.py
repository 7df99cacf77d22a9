"""What a run leaves on disk: its directory, checkpoints, log and status."""
