"""What ``bench gpu`` runs on every rank: rungs, from the first collective to whole steps, each of which needs those before."""
