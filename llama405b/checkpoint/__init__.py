"""Checkpoints that are whole or not there: written, verified, restored."""
