"""What runs on a GPU host beside training: a module for each command."""
