"""Weights in pickles: ``pytorch_model*.bin`` of older models, or a file for each module. Only tensors are unpickled (``weights_only``).

Of the latter a file has the name of its module, ``model.layers.17.pt``, and its tensors have theirs within it, or in the model.
"""

import functools
import hashlib
import pickle
from pathlib import Path

import torch
from torch import Tensor

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import and_more, reason_of
from llama405b.contract.tensors import BY_LAYER, PICKLED, PICKLED_INDEX, read_weight_map
from llama405b.contract.weights import UNUSED_ANYWHERE

MODULES = ("model.", "lm_head")


class PickledWeights:
    """The weights in such files, by name in the model: mapped, so that they take no memory of their own."""

    def __init__(self, path: Path) -> None:
        """Find the files and list their tensors.

        Raises:
            UserError: A file is missing, damaged, or contains something other than tensors.
        """
        self.path, files = path, [PICKLED]
        if (path / BY_LAYER).is_file():
            files = sorted(file.name for file in path.glob("*.pt") if file.stem.startswith(MODULES))
        elif (path / PICKLED_INDEX).is_file():
            files = sorted({Path(name).name for name in read_weight_map(path / PICKLED_INDEX).values()})
        if missing := [name for name in files if not (path / name).is_file()]:
            raise UserError(f"{path / missing[0]}: missing{and_more(missing)}; download the files of the index")
        self.files: dict[str, str] = {}  # by tensor
        self.shapes: dict[str, tuple[int, ...]] = {}
        dtypes: set[torch.dtype] = set()
        for file in files:
            for name, tensor in self._open(file).items():
                if name in self.files and UNUSED_ANYWHERE not in name:
                    raise UserError(f"{path / file}: has {name}, as {self.files[name]} does; delete one of them")
                self.files[name], self.shapes[name] = file, tuple(tensor.shape)
                if UNUSED_ANYWHERE not in name:
                    dtypes.add(tensor.dtype)
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # holds all weights exactly
        known = [(name, (path / name).stat().st_size, (path / name).stat().st_mtime) for name in files]
        self.digest = hashlib.sha256(repr(known).encode()).hexdigest()

    def read(self, name: str) -> Tensor:
        """Return a whole tensor."""
        return self._open(self.files[name])[name].detach()

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one object per process
    def _open(self, name: str) -> dict[str, Tensor]:
        file = self.path / name
        try:
            content = torch.load(file, "cpu", weights_only=True, mmap=_can_be_mapped(file))
        except pickle.UnpicklingError:
            raise UserError(
                f"{file}: contains more than tensors, or is damaged; download it from a source that you trust"
            ) from None
        except (OSError, RuntimeError, EOFError) as error:
            raise UserError(f"{file}: cannot be read ({reason_of(error)}); download it again") from None
        if not isinstance(content, dict) or not all(isinstance(each, Tensor) for each in content.values()):
            raise UserError(f"{file}: is not a dictionary of tensors; only weights can be converted")
        if file.suffix == ".pt":
            return {name if name.startswith(MODULES) else f"{file.stem}.{name}": each for name, each in content.items()}
        return content


def _can_be_mapped(file: Path) -> bool:
    """Whether torch wrote it as a zip archive, as since 1.6; older files are read whole."""
    with file.open("rb") as opened:
        return opened.read(4) == b"PK\x03\x04"
