"""Facts about one machine, parsed from its programs' output: GPUs, fabric, torchrun, addresses. Pure."""
