"""The stages of a run: request, preflight, plan, start, following, guard, judgement and end."""
