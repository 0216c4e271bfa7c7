"""Check that machines are fit to train, and that they match."""
