"""What the trainer and the operator's tools agree on: the files of a run, its records and causes. Standard library and msgspec alone."""
