"""The page of one or several runs, also while they train: `fprnn report`."""
