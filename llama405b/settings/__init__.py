"""What a user can set, from files and flags, and what follows from settings alone; without torch."""
