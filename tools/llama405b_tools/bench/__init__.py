"""The operator's side, measured against named baselines."""
