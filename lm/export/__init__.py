"""From a run directory to a HuggingFace directory: weights, tokenizer, code and model card."""
