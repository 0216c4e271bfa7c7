"""Send metrics to trackers from a separate process, which reads the files that rank 0 writes anyway."""
