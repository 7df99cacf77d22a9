"""Use of trained models: lm-eval tasks, generation, and inspection of a text."""
