"""What is wrong with a host or between hosts, what it means, what to do. Pure."""
