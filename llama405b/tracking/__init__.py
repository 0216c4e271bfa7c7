"""A run's numbers, sent to trackers by a process of its own, from the files that rank 0 writes anyway."""
