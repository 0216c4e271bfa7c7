"""Split the model over the ranks: FSDP2, tensor, context and pipeline parallelism, and FSDP1 as in the recipe."""
