"""Text as tokens on disk: tokenizer, tokenising, the cache, the prepared corpus."""
