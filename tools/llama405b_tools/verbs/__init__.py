"""One module per verb: parse the command line, call, print."""
