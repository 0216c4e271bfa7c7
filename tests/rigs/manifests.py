"""A manifest of a checkpoint, and digests of files."""

import hashlib

from llama405b.contract.checkpoints import FileDigest, Manifest, RunIdentity
from llama405b.contract.hashes import BLOCK_BYTES, BlockHasher

HASH = hashlib.sha256(b"").hexdigest()
FILES = {
    "index.json": FileDigest(100, 0, (HASH,)),
    "weights-0-0.safetensors": FileDigest(3 * BLOCK_BYTES, 0, (HASH,) * 3),
    "weights-1-0.safetensors": FileDigest(0, 1, (HASH,)),
}
IDENTITY = RunIdentity("config 1", "900 tokens 2", 16, 6, "fp32", 0, 0)
MANIFEST = Manifest(
    3, 4, FILES, 2, run="a", hosts=("h0", "h1"), identity=IDENTITY, sequences=24, versions={"torch": "2"}
)


def hash_file(path, rank, block_bytes=BLOCK_BYTES):
    """What a manifest says of a file that ``rank`` wrote."""
    hasher = BlockHasher(block_bytes)
    hasher.update(content := path.read_bytes())
    return FileDigest(len(content), rank, hasher.blocks)
