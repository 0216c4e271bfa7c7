"""The inventory, and the ways to reach a host: this machine, SSH, many at once."""
