"""What the trainer and the operator's tools agree on: settings, records, and the files of a run. Standard library only."""
