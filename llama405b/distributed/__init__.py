"""Ranks and what they exchange, the mesh, device and pinned memory, NUMA: what every other room stands on."""
