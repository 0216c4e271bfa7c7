"""The Hugging Face Llama: built on the meta device, its attention, its activation checkpointing. Parallelism leaves it untouched."""
