"""Which files of a run's checkpoints are on this host, of those that an export needs. Standard library."""

import itertools
from pathlib import Path

from llama405b.contract.checkpoints import MANIFEST, committed, read_manifest, step_of
from llama405b.contract.plan import read_plan
from llama405b.contract.reader import MalformedError
from llama405b.contract.replicas import OF
from llama405b_tools.remote.describe import checkpoints_of
from llama405b_tools.remote.locks import run_of
from llama405b_tools.remote.messages.pieces import Piece, Pieces, PiecesRequest


def pieces(request: PiecesRequest) -> Pieces:
    """List them: of this host's own part of each checkpoint, and of its copies of others' parts."""
    run = run_of(request.run)
    root = checkpoints_of(run, read_plan(run)).absolute()
    if not root.is_dir():
        return Pieces("")
    paths = itertools.chain(committed(root), *(committed(copies) for copies in sorted(root.glob(f"{OF}*"))))
    found = [_piece(path, request.run) for path in paths]
    return Pieces(str(root), tuple(piece for piece in found if piece))


def _piece(path: Path, run: str) -> Piece | None:
    try:
        manifest, digest = read_manifest((path / MANIFEST).read_bytes())
    except (OSError, MalformedError):
        return None
    if manifest.run not in ("", run):
        return None
    needed = {name: seal.bytes for name, seal in manifest.files.items() if seal.weights}
    here = [name for name, size in needed.items() if (path / name).is_file() and (path / name).stat().st_size == size]
    return Piece(step_of(path), digest, str(path), (*here, MANIFEST), (*needed, MANIFEST))
