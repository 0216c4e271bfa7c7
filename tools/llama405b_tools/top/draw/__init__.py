"""Draw a view as lines of text. Pure."""
