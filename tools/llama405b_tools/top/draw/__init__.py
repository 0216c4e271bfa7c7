"""A picture as lines of text. Pure."""
