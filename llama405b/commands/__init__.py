"""Commands that run on a GPU host, other than training: one module each."""
