"""Deliver the environment, the code and big files to the hosts."""
