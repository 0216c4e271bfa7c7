"""Fold the hosts' reports into a view, with judgments. Pure."""
