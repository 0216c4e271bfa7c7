"""The inventory, and ways to reach hosts: this machine, SSH, many at once."""
