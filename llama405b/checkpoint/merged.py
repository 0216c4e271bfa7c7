"""The weights of a checkpoint that holds an adapter alone: merged with those beside which it was trained.

Knows manifests, settings that were saved, and safetensors; not how a model is written.
"""

import functools
import hashlib
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from llama405b.checkpoint.weights_of import SavedWeights
from llama405b.contract import config, weights
from llama405b.contract.adapters import DOWN, PEFT, UP, is_factor
from llama405b.contract.checkpoints import CONFIG_FILE
from llama405b.contract.errors import UserError
from llama405b.contract.schema import Config
from llama405b.contract.tensors import fingerprint_of, read_tensors


def has_adapter(found: SavedWeights) -> bool:
    """Whether a checkpoint holds an adapter alone."""
    return any(map(is_factor, found.shapes))


def settings_of(found: SavedWeights) -> Config:
    """Return the settings that a checkpoint was saved with.

    Raises:
        UserError: It has none.
    """
    path = found.path / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file, and only it says what the adapter is; export another step with --step")
    return config.resolve(config.read_toml(path))


class MergedWeights:
    """W + alpha / rank * B A of each target, in FP32, and all other weights as they are."""

    def __init__(self, found: SavedWeights, base: Path, settings: Config) -> None:
        """``base``: the directory of the model.

        Raises:
            UserError: It is not the one that the adapter was trained beside, or cannot be read.
        """
        self.found, self.path, self.base, adapter = found, found.path, base, settings.adapter
        self.scaling = adapter.alpha / adapter.rank
        if not base.is_dir():
            raise UserError(
                f"{base}: no such directory; name that of the model beside which {found.path} was trained with --model"
            )
        if settings.model.weights == "random":
            raise UserError(
                f"{found.path}: was trained beside random weights, so there are none to merge it into; use --adapter"
            )
        self.shapes = weights.read_llama(base, settings.model.layers).tensors()
        self.layout = read_tensors(base)
        for name, shape in self.shapes.items():
            if name not in self.layout or self.layout[name].shape != shape or self.layout[name].pieces:
                raise UserError(
                    f"{base}: has not the whole of {name}; name a directory with all weights of the model with --model"
                )
        fingerprint = fingerprint_of(self.layout)
        trained = re.search(r", weights (\w+)", found.manifest.identity.model if found.manifest.identity else "")
        if trained and not fingerprint.startswith(trained[1]):
            raise UserError(
                f"{base}: has not the weights beside which {found.path} was trained; name their directory with --model"
            )
        self.digest = hashlib.sha256(f"{found.digest} {fingerprint}".encode()).hexdigest()

    def read(self, name: str) -> Tensor:
        """Return a whole tensor; a target's in FP32."""
        info = self.layout[name]
        weight: Tensor = _open(info.file).get_tensor(name)  # type: ignore[no-untyped-call]
        matrix = name.removesuffix(".weight")
        if matrix + UP not in self.found.shapes:
            return weight
        down, up = (self.found.read(matrix + factor).float() for factor in (DOWN, UP))
        return torch.addmm(weight.float(), up, down, alpha=self.scaling)


class PeftWeights:
    """The adapter alone, under the names that it has in peft's files."""

    def __init__(self, found: SavedWeights) -> None:
        self.found, self.path = found, found.path
        self.shapes = {f"{PEFT}{name}": shape for name, shape in found.shapes.items()}
        self.digest = hashlib.sha256(f"{found.digest} peft".encode()).hexdigest()

    def read(self, name: str) -> Tensor:
        """Return a whole factor."""
        return self.found.read(name.removeprefix(PEFT))


@functools.lru_cache(maxsize=1)
def _open(file: Path) -> safe_open:
    return safe_open(file, framework="pt")
