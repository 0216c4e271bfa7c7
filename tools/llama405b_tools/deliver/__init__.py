"""The environment, the code and big files, to where they are needed."""
