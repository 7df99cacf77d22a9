"""Plans before a run, and pages, figures and tables of runs."""
