"""What a finished model is asked: lm-eval's tasks, samples, agreement, a look inside."""
