"""What a finished model is asked: lm-eval's tasks, samples, a look inside."""
