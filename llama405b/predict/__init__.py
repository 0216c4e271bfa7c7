"""What a run takes: memory, time and cost, and the search for the best that fits; without torch."""
