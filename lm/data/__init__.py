"""From text to micro-batches: sources, tokenizer, packing, preparation, loaders, n-grams."""
