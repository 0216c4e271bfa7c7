"""A safetensors file written tensor by tensor: no more than one is in memory. Knows the format; see ``contract.weights``."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from llama405b.contract.weights import DTYPE_BYTES

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> str:
    """Write tensors in this order and dtype; returns the file's SHA-256. It appears under its name when it is complete.

    Raises:
        OSError: The disk is full, or cannot be written.
    """
    partial, digest, begin = path.with_name(f".{path.name}.partial"), hashlib.sha256(), 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * DTYPE_BYTES[NAMES[dtype]]
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with partial.open("wb") as file:

        def put(content: bytes | memoryview) -> None:
            digest.update(content)
            file.write(content)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for name in shapes:
            put(memoryview(read(name).to(dtype).contiguous().flatten().view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return digest.hexdigest()
