"""Text for people: cleaned, folded, merged in time, formatted as figures and tables. Pure."""
