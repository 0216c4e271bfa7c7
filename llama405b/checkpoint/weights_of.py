"""A checkpoint's weights, tensor by tensor and without a process group: whatever number of ranks saved it.

Every block of its files that a tensor lies in is compared with the manifest before it is read. Knows manifests and DCP's
metadata; not the model's shape.
"""

import collections
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from llama405b.checkpoint.digests import PassedOver, open_manifest, warning_of
from llama405b.checkpoint.unpickling import TensorPlanner
from llama405b.checkpoint.verified import DamagedError, VerifiedReader
from llama405b.contract.checkpoints import WEIGHTS, write_manifest
from llama405b.contract.errors import UserError
from llama405b.contract.phrases import reason_of

T = TypeVar("T")


class SavedWeights:
    """The weights in a checkpoint, by name in the model."""

    def __init__(self, path: Path) -> None:
        """Read the manifest, and DCP's metadata once that is known to be what was saved.

        Raises:
            UserError: The checkpoint is incomplete or damaged, or cannot be read.
        """
        opened = open_manifest(path, {})
        if isinstance(opened, PassedOver):
            raise UserError(f"{opened}; export another step with --step")
        try:
            self.warning = warning_of(path, opened)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({reason_of(error)}); make it readable") from None
        self.path, self.manifest = path, opened
        self.reader = VerifiedReader(path, opened)
        metadata = self._naming_a_way_out(self.reader.read_metadata)
        self.parts = collections.defaultdict(list)  # of a tensor: file, offset, length
        for index, where in (metadata.storage_data or {}).items():
            self.parts[index.fqn].append((where.relative_path, where.offset, where.length))
        _, self.digest = write_manifest(opened)
        self.tensors: dict[str, TensorStorageMetadata] = {
            name.removeprefix(WEIGHTS): entry
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith(WEIGHTS) and isinstance(entry, TensorStorageMetadata)
        }
        self.shapes = {name: tuple(entry.size) for name, entry in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, in the dtype in which it was saved.

        Raises:
            UserError: A part of it is damaged, or is no tensor.
        """
        entry = self.tensors[name]
        for part in self.parts[f"{WEIGHTS}{name}"]:
            self._naming_a_way_out(functools.partial(self.reader.check, *part))
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            try:
                dcp.load(
                    {f"{WEIGHTS}{name}": tensor}, storage_reader=self.reader, planner=TensorPlanner(), no_dist=True
                )
            except CheckpointException as failed:
                [(cause, _)] = failed.failures.values()
                raise UserError(f"{self.path}: {name} cannot be read ({reason_of(cause)})") from None
        return tensor

    def _naming_a_way_out(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except DamagedError as fault:
            raise UserError(f"{fault}; export another step with --step") from None
