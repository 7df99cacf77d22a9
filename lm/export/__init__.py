"""Export of a run as a HuggingFace model folder: weights, tokenizer, code and model card."""
