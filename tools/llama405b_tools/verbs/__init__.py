"""A door for each verb: parse, call, print."""
