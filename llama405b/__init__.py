"""llama405b: fully fine-tune Llama 3.1 405B in plain PyTorch. Imports nothing, so that the tools stay light."""

__version__ = "0.3.0"
