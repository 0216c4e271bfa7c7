"""What is wrong with a host or between hosts, what it means, and what to do. Pure."""
