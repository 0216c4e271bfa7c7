"""How the model is laid over the ranks: FSDP2, and FSDP1 as the recipe has it."""
