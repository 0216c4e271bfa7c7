"""Weights of older models: ``pytorch_model*.bin``, which are pickles. Only tensors are unpickled (``weights_only``)."""

import functools
import hashlib
import pickle
from pathlib import Path

import torch
from torch import Tensor

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import and_more, reason_of
from llama405b.contract.tensors import PICKLED, PICKLED_INDEX, read_hf_json
from llama405b.contract.weights import UNUSED_ANYWHERE


class PickledWeights:
    """The weights in ``.bin`` files, by name in the model: mapped, so that they take no memory of their own."""

    def __init__(self, path: Path) -> None:
        """Find the files and list their tensors.

        Raises:
            UserError: A file is missing, damaged, or contains something other than tensors.
        """
        self.path, files = path, [PICKLED]
        if (path / PICKLED_INDEX).is_file():
            listed = read_hf_json(path / PICKLED_INDEX).get("weight_map")
            if not isinstance(listed, dict):
                raise UserError(f"{path / PICKLED_INDEX}: has no weight_map; download the file again")
            files = sorted({Path(str(name)).name for name in listed.values()})
        if missing := [name for name in files if not (path / name).is_file()]:
            raise UserError(f"{path / missing[0]}: missing{and_more(missing)}; download the files of the index")
        self.files = {name: file for file in files for name in self._open(file)}
        self.shapes = {name: tuple(self._open(file)[name].shape) for name, file in self.files.items()}
        known = [(name, (path / name).stat().st_size, (path / name).stat().st_mtime) for name in files]
        self.digest = hashlib.sha256(repr(known).encode()).hexdigest()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that holds all weights exactly."""
        dtypes = {self.read(name).dtype for name in self.files if UNUSED_ANYWHERE not in name}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def read(self, name: str) -> Tensor:
        """Return a whole tensor."""
        return self._open(self.files[name])[name]

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
        return content


def _can_be_mapped(file: Path) -> bool:
    """Whether torch wrote it as a zip archive, as since 1.6; older files are read whole."""
    with file.open("rb") as opened:
        return opened.read(4) == b"PK\x03\x04"
