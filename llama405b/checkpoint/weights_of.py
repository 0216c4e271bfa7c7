"""A checkpoint's weights, tensor by tensor and without a process group: whatever number of ranks saved it.

Every block of its files that a tensor lies in is compared with the manifest before it is read. Knows manifests and DCP's
metadata; not the model's shape.
"""

import collections
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from llama405b.checkpoint.seal import PassedOver, block_hashes, open_manifest
from llama405b.contract.checkpoints import METADATA, Manifest
from llama405b.contract.errors import UserError

PREFIX = "model."  # of the weights, among what DCP saves


class SavedWeights:
    """The weights in a checkpoint, by name in the model."""

    def __init__(self, path: Path) -> None:
        """Read the manifest, and DCP's metadata once that is known to be what was saved: it is a pickle.

        Raises:
            UserError: The checkpoint is incomplete or damaged.
        """
        opened = open_manifest(path, {})
        if isinstance(opened, PassedOver):
            raise UserError(f"{opened}; export another step with --step")
        self.path, self.manifest = path, opened
        self.reader = _Checked(path, opened)
        self.reader.check(METADATA, 0, opened.files[METADATA].bytes)
        metadata = self.reader.read_metadata()
        self.parts = collections.defaultdict(list)  # of a tensor: file, offset, length
        for index, where in (metadata.storage_data or {}).items():
            self.parts[index.fqn].append((where.relative_path, where.offset, where.length))
        self.tensors: dict[str, TensorStorageMetadata] = {
            name.removeprefix(PREFIX): entry
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, in the dtype in which it was saved.

        Raises:
            UserError: A part of it is damaged.
        """
        entry = self.tensors[name]
        for part in self.parts[f"{PREFIX}{name}"]:
            self.reader.check(*part)
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            dcp.load({f"{PREFIX}{name}": tensor}, storage_reader=self.reader, no_dist=True)
        return tensor


class _Checked(FileSystemReader):
    """Knows which blocks match the manifest's hashes."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self.manifest, self.good = manifest, set[tuple[str, int]]()
        self.metadata: Metadata | None = None

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """Return DCP's metadata, which is read once."""
        self.metadata = self.metadata or super().read_metadata()
        return self.metadata

    def check(self, name: str, offset: int, length: int) -> None:
        """Compare the blocks of a part of a file with the manifest.

        Raises:
            UserError: One differs, or is missing.
        """
        size, file = self.manifest.block_bytes, Path(self.path) / name
        blocks = range(offset // size, -(-(offset + length) // size))
        unknown = [block for block in blocks if (name, block) not in self.good]
        sealed = self.manifest.files.get(name)
        if sealed is None or not file.is_file() or file.stat().st_size != sealed.bytes:
            raise UserError(f"{file}: missing, or not of the size that was saved; export another step with --step")
        for block, found in zip(unknown, block_hashes(file, unknown, size), strict=True):
            if found != sealed.blocks[block]:
                raise UserError(
                    f"{file}: its content does not match its checksum (block {block + 1} of {len(sealed.blocks)}); "
                    "export another step with --step"
                )
            self.good.add((name, block))
