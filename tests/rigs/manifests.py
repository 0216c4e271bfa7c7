"""A manifest of a checkpoint."""

import hashlib

from llama405b.contract.checkpoints import FileDigest, Manifest, RunIdentity
from llama405b.contract.hashes import BLOCK_BYTES

HASH = hashlib.sha256(b"").hexdigest()
FILES = {
    ".metadata": FileDigest(100, 0, (HASH,)),
    "__0_0.distcp": FileDigest(3 * BLOCK_BYTES, 0, (HASH,) * 3),
    "__1_0.distcp": FileDigest(0, 1, (HASH,)),
}
IDENTITY = RunIdentity("config 1", "900 tokens 2", 16, 6, "fp32", 0, 0)
MANIFEST = Manifest(
    2, 4, FILES, 2, run="a", hosts=("h0", "h1"), identity=IDENTITY, sequences=24, versions={"torch": "2"}
)
