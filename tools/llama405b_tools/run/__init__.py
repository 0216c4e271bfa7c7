"""What is known of a run: its state, logs and ranks, and how it is followed and ended."""
