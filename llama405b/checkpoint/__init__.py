"""Checkpoints that are complete or absent: written, verified, restored."""
