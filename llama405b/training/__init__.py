"""Composition: what builds a run from its settings, the loop that takes its steps, and what is reported of it."""
