"""What people look at: plans before a run, pages and figures after it."""
