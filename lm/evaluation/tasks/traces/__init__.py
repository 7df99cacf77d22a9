"""State-tracking questions: one lm-eval task per distance between question and fact."""
