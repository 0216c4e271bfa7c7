"""The operator's side: hosts, launching, watching, stopping. Never imports torch."""
