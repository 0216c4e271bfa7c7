"""Formats of training data. Does not import torch."""
