"""What goes between the operator's machine and a host's agent."""

KEEP = "keep\n"  # what a starting host is told once all hosts are up
