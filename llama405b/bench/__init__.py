"""Tests of the machines that will train: links, memory, steps, and the open questions on GPUs."""
