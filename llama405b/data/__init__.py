"""Turn documents into packed batches of tokens."""
