"""Benchmarks of the operator's side, against named baselines."""
