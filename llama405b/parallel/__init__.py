"""How the model is split over the ranks: FSDP2, and FSDP1 as in the recipe."""
