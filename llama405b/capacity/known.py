"""The shape of a model without its weights."""

import dataclasses
import json
from pathlib import Path

from llama405b.contract import config, weights
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Config


def known_shape(asked: Config, preset: str) -> weights.Llama | None:
    """Return the requested model's shape, from its directory or its preset; None: unknown.

    Raises:
        UserError: The directory's config.json cannot be used, or it has fewer layers than are asked for.
    """
    known = json.loads((config.PRESET_DIR / "architectures.json").read_text(encoding="utf-8"))
    directory = Path(asked.model.path)
    if (directory / "config.json").is_file():
        return weights.read_llama(directory, asked.model.layers)
    if preset not in known:
        return None
    llama = weights.parse_llama(known[preset], preset)
    if asked.model.layers > llama.layers:
        raise UserError(f"--model.layers: {asked.model.layers}, but {preset} has {llama.layers}; lower it, or omit it")
    return dataclasses.replace(llama, layers=asked.model.layers or llama.layers)
