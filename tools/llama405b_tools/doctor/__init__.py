"""Whether machines are fit to train, and agree with each other."""
