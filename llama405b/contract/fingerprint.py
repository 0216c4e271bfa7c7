"""Which model a checkpoint is, where names, dtypes and shapes are the same. Standard library."""

import hashlib

from llama405b.contract.errors import UserError
from llama405b.contract.tensors import Layout

SAMPLE_BYTES = 4096  # of each end of each tensor: training changes every tensor, or some rows, as those of added tokens


def fingerprint_of(tensors: Layout) -> str:
    """Return what tells a checkpoint from others, however its tensors are spread over files; a part says that of its whole.

    It is the SHA-256 of each tensor's name, dtype, shape, and first and last ``SAMPLE_BYTES``.

    Raises:
        UserError: The files of a part are from more than one checkpoint.
        OSError: A file cannot be read.
    """
    said = {info.whole for info in tensors.values()}
    if len(said) > 1:
        directory = next(iter(tensors.values())).file.parent
        raise UserError(f"{directory}: has files of more than one model; push them again with --shards")
    if said and (whole := said.pop()):
        return whole
    digest = hashlib.sha256()
    for name, info in sorted(tensors.items()):
        digest.update(repr((name, info.dtype, info.shape)).encode())
        with info.file.open("rb") as file:
            size = min(SAMPLE_BYTES, info.n_bytes)
            for begin in (info.offset, info.offset + info.n_bytes - size):
                file.seek(begin)
                digest.update(file.read(size))
    return digest.hexdigest()
