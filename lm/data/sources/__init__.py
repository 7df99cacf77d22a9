"""Sources of text: local files, the hub, generated text, and mixtures of sources."""
