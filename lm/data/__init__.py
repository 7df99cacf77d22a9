"""Data pipeline: text sources, tokenised corpora, micro-batches."""
