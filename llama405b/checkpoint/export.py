"""Read checkpoints, merged adapters and old pickles as a model's tensors; write them as safetensors, tensor by tensor.

A checkpoint of any number of ranks is read without a process group. Each block of its files is compared with the manifest before a
tensor in it is used. Pickles are ``pytorch_model*.bin``, or one file per module (``model.layers.17.pt``) whose tensors are named within
the module or within the model; only their tensors are unpickled (``weights_only``). Knows checkpoints and files of weights; not the
model's shape.
"""

import functools
import hashlib
import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from llama405b.checkpoint.format import (
    CheckpointReader,
    DamagedError,
    RejectedCheckpoint,
    open_manifest,
    write_access_warning,
)
from llama405b.checkpoint.index import DTYPE_NAMES
from llama405b.contract.checkpoints import CONFIG_FILE, WEIGHTS_PREFIX
from llama405b.contract.errors import UserError, and_more, reason_of
from llama405b.settings import config
from llama405b.settings.schema import Config
from llama405b.spec import models
from llama405b.spec.adapters import LORA_A, LORA_B, PEFT_PREFIX, is_lora_name
from llama405b.spec.models import IGNORED_TENSOR
from llama405b.spec.tensors import (
    LAYER_PICKLE_FILE,
    PICKLED_FILE,
    PICKLED_INDEX_FILE,
    build_header,
    compute_fingerprint,
    read_tensors,
    read_weight_map,
)

T = TypeVar("T")


class SavedWeights:
    """The weights in a checkpoint, by their names in the model."""

    def __init__(self, path: Path) -> None:
        """Read the manifest, then the index after verifying it.

        Raises:
            UserError: The checkpoint is incomplete or damaged, or cannot be read.
        """
        opened = open_manifest(path)
        if isinstance(opened, RejectedCheckpoint):
            raise UserError(f"{opened}; export another step with --step")
        self.path, (self.manifest, self.digest) = path, opened
        try:
            self.warning = write_access_warning(path, self.manifest)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({reason_of(error)}); make it readable") from None
        self.reader = CheckpointReader(path, self.manifest)
        index = self._read_or_refuse(lambda: self.reader.index)
        self.shapes = {
            name.removeprefix(WEIGHTS_PREFIX): saved.shape
            for name, saved in index.tensors.items()
            if name.startswith(WEIGHTS_PREFIX)
        }

    def read(self, name: str) -> Tensor:
        """Return a full tensor in the dtype in which it was saved.

        Raises:
            UserError: A part of it is damaged, is not a tensor, or cannot be read.
        """
        try:
            return self._read_or_refuse(lambda: self.reader.read_whole(f"{WEIGHTS_PREFIX}{name}"))
        except OSError as error:
            raise UserError(f"{self.path}: {name} cannot be read ({reason_of(error)})") from None

    def _read_or_refuse(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except DamagedError as error:
            raise UserError(f"{error}; export another step with --step") from None


def is_adapter_only(checkpoint: SavedWeights) -> bool:
    """Whether a checkpoint contains only an adapter."""
    return any(map(is_lora_name, checkpoint.shapes))


def saved_settings(checkpoint: SavedWeights) -> Config:
    """Return the settings that a checkpoint was saved with.

    Raises:
        UserError: The checkpoint has no settings file.
    """
    path = checkpoint.path / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file, so the adapter's settings are unknown; export another step with --step")
    return config.resolve(config.read_toml(path))


class MergedWeights:
    """W + alpha / rank * B A for each target, in FP32; all other weights unchanged."""

    def __init__(self, checkpoint: SavedWeights, base: Path, settings: Config) -> None:
        """``base``: the directory of the model.

        Raises:
            UserError: It is not the adapter's base model, or cannot be read.
        """
        self.checkpoint, self.path, self.base, adapter = checkpoint, checkpoint.path, base, settings.adapter
        self.scaling = adapter.alpha / adapter.rank
        if not base.is_dir():
            raise UserError(f"{base}: no such directory; pass the base model of {checkpoint.path} with --model")
        if settings.model.weights == "random":
            raise UserError(
                f"{checkpoint.path}: was trained on random weights, so there is no model to merge it into; use --adapter"
            )
        self.shapes = models.read_llama(base, settings.model.layers).tensors()
        self.layout = read_tensors(base)
        for name, shape in self.shapes.items():
            if name not in self.layout or self.layout[name].shape != shape or self.layout[name].slices:
                raise UserError(
                    f"{base}: {name} is missing or incomplete; pass a directory with all weights of the model with --model"
                )
        fingerprint = compute_fingerprint(self.layout)
        match = re.search(
            r", weights (\w+)", checkpoint.manifest.identity.model if checkpoint.manifest.identity else ""
        )
        if match and not fingerprint.startswith(match[1]):
            raise UserError(f"{base}: is not the base model of {checkpoint.path}; pass it with --model")
        self.digest = hashlib.sha256(f"{checkpoint.digest} {fingerprint}".encode()).hexdigest()

    def read(self, name: str) -> Tensor:
        """Return a full tensor; in FP32 if the adapter targets it."""
        info = self.layout[name]
        weight: Tensor = _open_safetensors(info.file).get_tensor(name)  # type: ignore[no-untyped-call]
        matrix = name.removesuffix(".weight")
        if matrix + LORA_B not in self.checkpoint.shapes:
            return weight
        down, up = (self.checkpoint.read(matrix + factor).float() for factor in (LORA_A, LORA_B))
        return torch.addmm(weight.float(), up, down, alpha=self.scaling)


class PeftWeights:
    """The adapter alone, under its names in peft's files."""

    def __init__(self, checkpoint: SavedWeights) -> None:
        self.checkpoint, self.path = checkpoint, checkpoint.path
        self.shapes = {f"{PEFT_PREFIX}{name}": shape for name, shape in checkpoint.shapes.items()}
        self.digest = hashlib.sha256(f"{checkpoint.digest} peft".encode()).hexdigest()

    def read(self, name: str) -> Tensor:
        """Return a full factor (A or B of a target)."""
        return self.checkpoint.read(name.removeprefix(PEFT_PREFIX))


@functools.lru_cache(maxsize=1)
def _open_safetensors(file: Path) -> safe_open:
    return safe_open(file, framework="pt")


MODULE_PREFIXES = ("model.", "lm_head")


class PickledWeights:
    """The weights in pickled files, by their names in the model; memory-mapped where possible."""

    def __init__(self, path: Path) -> None:
        """Find the files and list their tensors.

        Raises:
            UserError: A file is missing, damaged, or contains something other than tensors.
        """
        self.path, files = path, [PICKLED_FILE]
        if (path / LAYER_PICKLE_FILE).is_file():
            files = sorted(file.name for file in path.glob("*.pt") if file.stem.startswith(MODULE_PREFIXES))
        elif (path / PICKLED_INDEX_FILE).is_file():
            files = sorted({Path(name).name for name in read_weight_map(path / PICKLED_INDEX_FILE).values()})
        if missing := [name for name in files if not (path / name).is_file()]:
            raise UserError(f"{path / missing[0]}: missing{and_more(missing)}; download the files of the index")
        self.files: dict[str, str] = {}  # by tensor
        self.shapes: dict[str, tuple[int, ...]] = {}
        dtypes: set[torch.dtype] = set()
        for file in files:
            for name, tensor in self._open(file).items():
                if name in self.files and IGNORED_TENSOR not in name:
                    raise UserError(f"{path / file}: {name} is also in {self.files[name]}; delete one of them")
                self.files[name], self.shapes[name] = file, tuple(tensor.shape)
                if IGNORED_TENSOR not in name:
                    dtypes.add(tensor.dtype)
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # holds all weights exactly
        file_stats = [(name, (path / name).stat().st_size, (path / name).stat().st_mtime) for name in files]
        self.digest = hashlib.sha256(repr(file_stats).encode()).hexdigest()

    def read(self, name: str) -> Tensor:
        """Return a full tensor."""
        return self._open(self.files[name])[name].detach()

    @functools.lru_cache(maxsize=1)  # noqa: B019 - one object per process
    def _open(self, name: str) -> dict[str, Tensor]:
        file = self.path / name
        try:
            content = torch.load(file, "cpu", weights_only=True, mmap=_is_zip_archive(file))
        except pickle.UnpicklingError:
            raise UserError(
                f"{file}: contains more than tensors, or is damaged; download it from a source that you trust"
            ) from None
        except (OSError, RuntimeError, EOFError) as error:
            raise UserError(f"{file}: cannot be read ({reason_of(error)}); download it again") from None
        if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
            raise UserError(f"{file}: is not a dictionary of tensors; only weights can be converted")
        if file.suffix == ".pt":
            return {
                name if name.startswith(MODULE_PREFIXES) else f"{file.stem}.{name}": tensor
                for name, tensor in content.items()
            }
        return content


def _is_zip_archive(file: Path) -> bool:
    """Whether a file is a zip archive, as torch 1.6 and later write; older files cannot be mapped."""
    with file.open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04"


def partial_file(path: Path) -> Path:
    """Return the path of the file while it is being written."""
    return path.with_name(f".{path.name}.partial")


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> str:
    """Write tensors in this order and dtype, and return the file's SHA-256.

    The file appears under its name when it is complete.

    Raises:
        OSError: The disk is full, or cannot be written.
    """
    partial = partial_file(path)
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as file:

            def write_chunk(content: bytes | memoryview) -> None:
                digest.update(content)
                file.write(content)

            write_chunk(build_header({name: (DTYPE_NAMES[dtype], shape) for name, shape in shapes.items()}))
            for name in shapes:
                write_chunk(memoryview(read(name).to(dtype).contiguous().flatten().view(torch.uint8).numpy()))
            # on the disk before the rename: a crash leaves no damaged file under the final name
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)  # otherwise it takes the room of the next try
        raise
    partial.rename(path)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as it is now, in the form that ``write_tensors`` returns."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
