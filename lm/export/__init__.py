"""From a run directory to a HuggingFace directory: code, card, upload, the paper's reference."""
