"""What ``bench`` runs on every rank: tests (rungs), from the first collective to whole steps, each of which needs those before."""
