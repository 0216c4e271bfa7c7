"""From documents to packed batches of tokens."""
