"""Ranks, collectives, the mesh, device and pinned memory, NUMA: the base of all other packages of the trainer."""
