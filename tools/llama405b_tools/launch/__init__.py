"""Check the hosts, place the ranks, and start a run on every host, or on none."""
