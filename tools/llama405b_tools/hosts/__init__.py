"""The hosts file, and connections to hosts: this machine, SSH, many at once."""
