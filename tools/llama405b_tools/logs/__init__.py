"""Every log of every rank, as one stream."""
