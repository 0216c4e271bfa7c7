"""Words for people: cleaned, folded, merged in time, written as figures and tables. Pure."""
