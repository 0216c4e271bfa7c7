"""Read what checkpoints of manifest format 2 hold: DCP's pickled metadata, and a ``torch.save`` for each chunk.

Only DCP's own types are unpickled, so that nothing in a checkpoint is executed; a chunk must be a tensor. This version reads the form so
that runs go on over the upgrade; nothing writes it any more.
"""

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_types
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from llama405b.checkpoint.index import DTYPE_NAMES, Chunk, Chunks, Index, SavedTensor
from llama405b.contract.checkpoints import DATA_FILE
from llama405b.contract.errors import UserError, shorten

_DCP_TYPES = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties),
    *(TensorStorageMetadata, _StorageInfo, dcp_types._MEM_FORMAT_ENCODING, torch.Size, torch.serialization._get_layout),
)


class UnsafeError(UserError):
    """A file contains what our checkpoints never contain and what could run code as this user."""


def _getattr_of_enum(kind: object, name: str) -> object:
    """Stand in for ``getattr`` in a pickle, with which Python 3.11.0 to 3.11.3 write an enum's member."""
    members = dcp_types._MEM_FORMAT_ENCODING.__members__
    if kind is dcp_types._MEM_FORMAT_ENCODING and name in members:
        return members[name]
    raise UnsafeError(repr("builtins.getattr"))


ALLOWED_GLOBALS = {
    **{(each.__module__, each.__name__): each for each in _DCP_TYPES},
    **{("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    **{
        (module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")
    },  # Python 3.13 moved it
    ("builtins", "getattr"): _getattr_of_enum,
}


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickles only DCP's own types, and refuses all others by name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_GLOBALS:
            raise UnsafeError(repr(shorten(f"{module}.{name}")))
        return ALLOWED_GLOBALS[module, name]


def read_metadata(file: Path) -> Metadata:
    """Unpickle DCP's metadata safely."""
    try:
        with file.open("rb") as stream:
            metadata = _RestrictedUnpickler(stream).load()
        if not _is_valid_metadata(metadata):
            raise TypeError
    except OSError:
        raise
    except UnsafeError as unknown:
        raise UnsafeError(
            f"{file}: holds {unknown}, which DCP's metadata never contains and which could run commands as you; do not use this checkpoint"
        ) from None
    except Exception as error:  # noqa: BLE001 - what is in a pickle can raise anything
        raise UserError(f"{file}: is not DCP's metadata ({type(error).__name__}); use another checkpoint") from None
    return metadata


def _is_valid_metadata(metadata: Any) -> bool:
    """Whether metadata has the types that are used before DCP checks it."""
    return (
        isinstance(metadata, Metadata)
        and all(
            isinstance(name, str) and _is_valid_entry(entry) for name, entry in metadata.state_dict_metadata.items()
        )
        and all(
            isinstance(index, MetadataIndex) and _is_valid_storage_info(info)
            for index, info in metadata.storage_data.items()
        )
    )


def _is_valid_entry(entry: Any) -> bool:
    if isinstance(entry, TensorStorageMetadata):
        chunks = [size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes)]
        return isinstance(entry.properties.dtype, torch.dtype) and all(
            isinstance(size, torch.Size) for size in (entry.size, *chunks)
        )
    return isinstance(entry, BytesStorageMetadata)


def _is_valid_storage_info(info: Any) -> bool:
    kinds = [type(value) for value in (info.relative_path, info.offset, info.length)]
    return isinstance(info, _StorageInfo) and kinds == [str, int, int]


def read_index(file: Path) -> tuple[Index, dict[tuple[str, Chunk], tuple[str, int, int]]]:
    """Return which tensors DCP's metadata describes, and each part's file, offset and length there; what is not a tensor is left out."""
    metadata = read_metadata(file)
    layouts: dict[Chunks, int] = {}
    tensors: dict[str, SavedTensor] = {}
    places: dict[tuple[str, Chunk], tuple[str, int, int]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata) or entry.properties.dtype not in DTYPE_NAMES:
            continue
        chunks = []
        for number, part in enumerate(entry.chunks):
            info = metadata.storage_data.get(MetadataIndex(name, part.offsets))
            match = DATA_FILE.fullmatch(info.relative_path) if info else None
            if info and match:
                box = tuple((begin, begin + size) for begin, size in zip(part.offsets, part.sizes, strict=True))
                chunks.append(chunk := Chunk(int(match[2]), box, f"#{number}"))
                places[name, chunk] = info.relative_path, info.offset, info.length
        layout = layouts.setdefault(tuple(chunks), len(layouts))
        tensors[name] = SavedTensor(DTYPE_NAMES[entry.properties.dtype], tuple(entry.size), layout)
    return Index(tuple(layouts), tensors), places


def decode_chunk(content: bytes, file: Path) -> Tensor:
    """Return the tensor that ``torch.save`` wrote.

    Raises:
        UnsafeError: It is something else.
    """
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - what is in a pickle can raise anything
        tensor = None
    if not isinstance(tensor, Tensor):
        raise UnsafeError(
            f"{file}: holds something that is not a tensor and could run commands as you; do not use this checkpoint"
        )
    return tensor
