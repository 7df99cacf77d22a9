"""Questions about state that a text contains, one gap a task."""
