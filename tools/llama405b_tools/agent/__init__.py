"""What runs on a host, and the messages that it takes and gives."""
