"""Tokenised text on disk: the tokenizer, prepared corpora and their cache."""
