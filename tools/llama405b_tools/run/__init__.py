"""What a run is made of: its request, preflight, plan, start, following, guard, judgement and end."""
