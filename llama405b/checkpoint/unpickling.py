"""Read a checkpoint in DCP's format without running anything that is in it: DCP unpickles its metadata, and whatever is no tensor.

A manifest tells whether a file is what was saved, not who saved it, or why. Knows DCP's types; not manifests.
"""

import pathlib
import pickle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, LoadPlanner
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
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from llama405b.contract.checkpoints import METADATA
from llama405b.contract.errors import UserError
from llama405b.contract.phrases import short

_OF_DCP = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties),
    *(TensorStorageMetadata, _StorageInfo, dcp_types._MEM_FORMAT_ENCODING, torch.Size, torch.serialization._get_layout),
)


class UnsafeError(UserError):
    """A file holds what no checkpoint of ours does, and what might run as this user."""


def _member(kind: object, name: str) -> object:
    """What ``getattr`` is to a pickle: Python 3.11.0 to 3.11.3 write an enum's member so, and nothing else of ours is written so."""
    members = dcp_types._MEM_FORMAT_ENCODING.__members__
    if kind is dcp_types._MEM_FORMAT_ENCODING and name in members:
        return members[name]
    raise UnsafeError(repr("builtins.getattr"))


KNOWN = {
    **{(each.__module__, each.__name__): each for each in _OF_DCP},
    **{("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    **{
        (module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")
    },  # Python 3.13's has moved
    ("builtins", "getattr"): _member,
}


class _OnlyKnown(pickle.Unpickler):
    """Builds DCP's own types, and refuses all else by name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise UnsafeError(repr(short(f"{module}.{name}")))
        return KNOWN[module, name]


def read_metadata(file: Path) -> Metadata:
    """Return DCP's metadata.

    Raises:
        UnsafeError: It names anything but DCP's own types.
        UserError: It is not DCP's metadata.
        OSError: It cannot be read.
    """
    try:
        with file.open("rb") as opened:
            found = _OnlyKnown(opened).load()
        if not _is_sound(found):
            raise TypeError
    except OSError:
        raise
    except UnsafeError as unknown:
        raise UnsafeError(
            f"{file}: holds {unknown}, which is no type of DCP's metadata, and might run commands as you; do not use this checkpoint"
        ) from None
    except Exception as error:  # noqa: BLE001 - what is in a pickle can raise anything
        raise UserError(f"{file}: is not DCP's metadata ({type(error).__name__}); use another checkpoint") from None
    return found


def _is_sound(found: Any) -> bool:
    """Whether it is what it seems, as far as it is used before DCP checks it."""
    return (
        isinstance(found, Metadata)
        and all(isinstance(name, str) and _is_entry(entry) for name, entry in found.state_dict_metadata.items())
        and all(isinstance(index, MetadataIndex) and _is_place(where) for index, where in found.storage_data.items())
    )


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, TensorStorageMetadata):
        return isinstance(entry.size, torch.Size) and isinstance(entry.properties.dtype, torch.dtype)
    return isinstance(entry, BytesStorageMetadata)


def _is_place(where: Any) -> bool:
    kinds = [type(each) for each in (where.relative_path, where.offset, where.length)]
    return isinstance(where, _StorageInfo) and kinds == [str, int, int]


class TensorReader(FileSystemReader):
    """Reads tensors."""

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """Return DCP's metadata; see the function."""
        return read_metadata(Path(self.path) / METADATA)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs."""
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError:
            names = sorted({self.storage_data[item.storage_index].relative_path for item in plan.items})
            _refuse(f"{Path(self.path) / names[0]}")


class TensorPlanner(DefaultLoadPlanner):
    """Loads tensors alone."""

    def load_bytes(self, read_item: ReadItem, _value: object) -> None:
        """Refuse what DCP would unpickle."""
        _refuse(f"{read_item.dest_index.fqn} in the checkpoint")


def _refuse(what: str) -> NoReturn:
    raise UnsafeError(f"{what}: is no tensor, and might run commands as you; do not use this checkpoint")
