"""Build a run from its settings, run its steps, and report on it."""
