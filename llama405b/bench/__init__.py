"""Tests of the machines that will train: links, memory, steps, and open questions about GPUs."""
