"""What a report looks like. Pure."""
