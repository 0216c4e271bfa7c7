"""The report of a run: its curves, what its time went into, and what happened, in the terminal and as a page."""
