"""Facts of one machine, read from what its programs say: GPUs, fabric, Slurm's words, addresses. Pure."""
