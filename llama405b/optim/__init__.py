"""AdamW and its schedule."""
