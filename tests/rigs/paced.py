"""For ``--training.extend``: a run without an end that leaves the processors to what is tested beside it."""

import time

EVERY = 1


def every(moment):
    """Wait after each step."""
    time.sleep(0.2)
