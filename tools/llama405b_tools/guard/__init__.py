"""Restart a run by itself: the policy, and the process that follows it."""
