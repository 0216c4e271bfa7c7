"""A safetensors file written tensor by tensor: no more than one is in memory. Knows the format; see ``contract.tensors``."""

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from llama405b.contract.tensors import DTYPE_BYTES, header_bytes

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def partial_of(path: Path) -> Path:
    """Return the file that is written first."""
    return path.with_name(f".{path.name}.partial")


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> str:
    """Write tensors in this order and dtype; returns the file's SHA-256. It appears under its name when it is complete.

    Raises:
        OSError: The disk is full, or cannot be written.
    """
    partial = partial_of(path)
    digest = hashlib.sha256()
    begin = 0
    entries: dict[str, object] = {}
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * DTYPE_BYTES[NAMES[dtype]]
        entries[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    try:
        with partial.open("wb") as file:

            def put(content: bytes | memoryview) -> None:
                digest.update(content)
                file.write(content)

            put(header_bytes(entries))
            for name in shapes:
                put(memoryview(read(name).to(dtype).contiguous().flatten().view(torch.uint8).numpy()))
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)  # or it would take the room of the next try
        raise
    partial.rename(path)
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as it is now, as ``write_tensors`` does of what it wrote."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
