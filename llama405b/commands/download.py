"""Download a model or a dataset from the Hugging Face Hub, only what training needs, and verify it.

Run it on the host that needs it (the first one, for a dataset); only that host needs HF_TOKEN. An interrupted download
continues with the incomplete files, each from its beginning. Every file's size is checked, and its SHA-256 if the Hub has one.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import fnmatch
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llama405b.contract.disk import disk_free_bytes
from llama405b.contract.errors import EXIT_DETACHED, RunError, UserError, format_size, pluralize
from llama405b.contract.files import read_record, write_json
from llama405b.contract.hashes import BlockHasher, HashStore
from llama405b.data.hub import dataset_files, explain_hub_errors
from llama405b.settings.parser import OneLineParser
from llama405b.spec import models
from llama405b.spec.tensors import INDEX_FILE, PICKLED_INDEX_FILE, is_pickled, read_tensors

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

MAX_PARALLEL = 4
SAFETENSORS = (INDEX_FILE, "model*.safetensors")  # not the original or consolidated copies of the weights
PICKLED_FILES = (PICKLED_INDEX_FILE, "pytorch_model*.bin")  # for models without safetensors
READ_BYTES = 4 << 20


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="llama405b download", description=__doc__)
    add = parser.add_argument
    add("name", metavar="NAME", help="owner/name, like meta-llama/Llama-3.1-405B")
    add("--dataset", action="store_true", help="NAME is a dataset, not a model")
    files = "download only these files of a dataset, like 'data/train-*' [all text and Parquet]"
    add("--only", metavar="GLOB", help=files)
    add("--to", type=Path, metavar="DIR", help="target directory [models/<name>, or data/<name>]")
    add("--revision", default="main", help="a branch, tag or commit [main]")
    add("--skip-weights", action="store_true", help="download only the configuration and tokenizer")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = _parser().parse(argv)
    if args.name.count("/") != 1:
        raise UserError(f"download: {args.name!r} is not the name of a model or dataset; write owner/name")
    if (args.only or args.dataset) and not (args.dataset and not args.skip_weights):
        raise UserError("--only is for datasets, and --skip-weights for models; leave it out, or add --dataset")
    target = args.to or (Path("data") if args.dataset else models.DOWNLOAD_DIR) / args.name.partition("/")[2]
    if args.dataset:
        fetch_dataset(args.name, args.revision, target, args.only)
    else:
        fetch_model(args.name, args.revision, target, skip_weights=args.skip_weights)
    return 0


RECORD_NAME = ".llama405b-download.json"  # in the target directory: what was downloaded, once complete
LOCK_NAME = ".llama405b-download.lock"
UNFINISHED_DIR = ".cache/huggingface/download"  # where huggingface_hub keeps incomplete files, in the target directory


@dataclasses.dataclass(frozen=True, slots=True)
class DownloadRecord:
    """The record of a complete download in its directory."""

    repo: str
    revision: str
    commit: str
    names: tuple[str, ...]


def complete_commit(repo: str, revision: str, target: Path) -> str:
    """Return the commit whose requested files are all in a directory, unchanged; '' if some are not."""
    record = read_record(DownloadRecord, target / RECORD_NAME)
    if not record or (record.repo, record.revision) != (repo, revision):
        return ""
    hashes = HashStore(target)
    return record.commit if all(hashes.find(name) for name in record.names) else ""


@contextlib.contextmanager
def fall_back_to_complete(repo: str, revision: str, target: Path) -> Iterator[None]:
    """Accept a complete download if the Hub does not answer."""
    try:
        yield
    except RunError as error:
        if not (commit := complete_commit(repo, revision, target)):
            raise
        print(f"{target}: complete as of {commit}; whether {repo} has changed since is unknown: {error}")


def fetch_dataset(name: str, revision: str, target: Path, only: str | None) -> None:
    """Download and verify a dataset's text and table files, or those that match a glob."""
    repo = f"datasets/{name}"
    with fall_back_to_complete(repo, f"{revision} {only or ''}", target), explain_hub_errors(repo, target):
        commit, files = dataset_files(name, revision, only)
        _download_files(Repo(repo, commit), files, target)
        _write_record(DownloadRecord(repo, f"{revision} {only or ''}", commit, _file_names(files)), target)
    print(f"complete: train on it with --data.paths {target}")


def fetch_model(model: str, revision: str, target: Path, *, skip_weights: bool) -> None:
    """Download and verify a model."""
    from huggingface_hub import HfApi

    requested = f"{revision}{' without weights' if skip_weights else ''}"
    with fall_back_to_complete(model, requested, target), explain_hub_errors(model, target):
        info = HfApi().model_info(model, revision=revision, files_metadata=True)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        kinds = SAFETENSORS if any(fnmatch.fnmatch(name, SAFETENSORS[1]) for name in names) else PICKLED_FILES
        files = [
            sibling for sibling in info.siblings or () if is_needed(sibling.rfilename, () if skip_weights else kinds)
        ]
        if not any(sibling.rfilename == "config.json" for sibling in files):
            raise UserError(f"{model}: has no config.json; only models in Hugging Face format can be trained")
        _download_files(Repo(model, str(info.sha)), files, target)
        _write_record(DownloadRecord(model, requested, str(info.sha), _file_names(files)), target)
    if skip_weights:
        return
    llama = models.read_llama(target)
    next_step = f"train with --model.path {target}"
    if is_pickled(target):
        next_step = f"convert its .bin files with `llama405b export {target} OUT`"
    else:
        read_tensors(target)
    print(f"complete: {llama.parameters:,} parameters; {next_step}")


@dataclasses.dataclass(frozen=True, slots=True)
class Repo:
    """A model or dataset on the Hub, at a commit."""

    name: str  # owner/name, or datasets/owner/name
    commit: str


def _file_names(files: Sequence["RepoSibling"]) -> tuple[str, ...]:
    return tuple(sibling.rfilename for sibling in files)


def _write_record(record: DownloadRecord, target: Path) -> None:
    """Record a complete download; without write permission the Hub is asked again each time."""
    if read_record(DownloadRecord, target / RECORD_NAME) != record:
        with contextlib.suppress(OSError):
            write_json(target / RECORD_NAME, record)


def _unfinished_files(target: Path) -> list[Path]:
    return list((target / UNFINISHED_DIR).rglob("*.incomplete"))


def _total_bytes(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


@contextlib.contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Lock a directory against other downloads, and delete incomplete files of an interrupted one."""
    target.mkdir(parents=True, exist_ok=True)
    with (target / LOCK_NAME).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = "another download is writing there; wait for it, or name another directory"
            raise UserError(f"{target}: {problem}") from None
        except OSError:  # a file system without locks
            pass
        if unfinished := _unfinished_files(target):
            size = format_size(_total_bytes(unfinished))
            print(
                f"an interrupted download left {pluralize(len(unfinished), 'file')} incomplete ({size}): deleted, will be downloaded again"
            )
        for path in unfinished:
            path.unlink()
        yield


def _download_files(repo: Repo, files: list["RepoSibling"], target: Path) -> None:
    """Download and verify the missing files; write nothing if there are none."""
    hashes = HashStore(target)
    missing = [sibling for sibling in files if not is_verified(hashes, sibling)]
    _check_free_space(target, missing)
    with _exclusive(target) if missing else contextlib.nullcontext():
        _download_missing(repo, files, missing, target, hashes)


def _download_missing(
    repo: Repo, files: Sequence["RepoSibling"], missing: Sequence["RepoSibling"], target: Path, hashes: HashStore
) -> None:
    size, n_files = _hub_bytes(files) / 1e9, pluralize(len(files), "file")
    print(
        f"{repo.name} at {repo.commit}: {n_files}, {size:.2f} GB; {len(missing)} to download into {target}", flush=True
    )
    if missing:  # until they are here, the directory is not complete
        (target / RECORD_NAME).unlink(missing_ok=True)
    pool = concurrent.futures.ThreadPoolExecutor(MAX_PARALLEL)
    jobs = [pool.submit(_fetch_one, repo, sibling, target, hashes) for sibling in missing]
    try:
        try:
            for n_done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
                print(f"{n_done}/{len(missing)}  {job.result()}: verified", flush=True)
        finally:  # after a failure, let downloads in progress finish
            pool.shutdown(wait=not isinstance(sys.exception(), KeyboardInterrupt), cancel_futures=True)
    except KeyboardInterrupt:
        print(
            "interrupted: complete files are kept; run the same command again for the rest",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_DETACHED)  # threads cannot be killed, and their files may be large


def is_needed(name: str, kinds: Sequence[str]) -> bool:
    """Return whether training needs a file: a small one, or weights that match ``kinds`` (patterns)."""
    return models.is_small_file(name) or ("/" not in name and any(fnmatch.fnmatch(name, kind) for kind in kinds))


def _fetch_one(repo: Repo, sibling: "RepoSibling", target: Path, hashes: HashStore) -> str:
    """Download and verify one file; if verification fails, download it once more; return its name."""
    from huggingface_hub import hf_hub_download

    name: str = sibling.rfilename
    kind = "dataset" if repo.name.startswith("datasets/") else "model"
    repo_id = repo.name.removeprefix("datasets/")
    for force in (False, True):
        path = Path(
            hf_hub_download(repo_id, name, repo_type=kind, revision=repo.commit, local_dir=target, force_download=force)
        )
        sha256, blocks = _hash_file(path)
        fault = download_fault(path, sha256, sibling)
        if not fault:
            hashes.add(name, blocks, sha256)
            return name
    raise RunError(f"{path}: {fault}, twice; check the disk and the network for data corruption")


def is_verified(hashes: HashStore, sibling: "RepoSibling") -> bool:
    """Return whether the local file is verified and unchanged."""
    entry = hashes.find(sibling.rfilename)
    return entry is not None and sibling.size in (None, entry.bytes) and hub_sha256(sibling) in ("", entry.sha256)


def _hash_file(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the SHA-256 of a file, and of each of its blocks."""
    file_hash, hasher = hashlib.sha256(), BlockHasher()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            file_hash.update(chunk)
            hasher.update(chunk)
    return file_hash.hexdigest(), hasher.blocks


def download_fault(path: Path, sha256: str, sibling: "RepoSibling") -> str:
    """Return what is wrong with a file, as a clause; '' if nothing is."""
    size = path.stat().st_size
    if sibling.size is not None and size != sibling.size:
        return f"{size} bytes, but the Hub says {sibling.size}"
    return "its content does not match the Hub's SHA-256" if hub_sha256(sibling) not in ("", sha256) else ""


def hub_sha256(sibling: "RepoSibling") -> str:
    """Return the Hub's SHA-256 of a large file; '' for a small one."""
    lfs = getattr(sibling, "lfs", None)
    if not lfs:
        return ""
    return str(lfs["sha256"] if isinstance(lfs, dict) else getattr(lfs, "sha256", ""))


def _hub_bytes(siblings: Sequence["RepoSibling"]) -> int:
    return sum(sibling.size or 0 for sibling in siblings)


def _has_right_size(path: Path, sibling: "RepoSibling") -> bool:
    """Return whether a file has the right size, so that it needs no space even if it is downloaded again."""
    return path.is_file() and path.stat().st_size == sibling.size


def _check_free_space(target: Path, missing: Sequence["RepoSibling"]) -> None:
    existing = target
    while not existing.exists():
        existing = existing.parent
    needed = _hub_bytes([sibling for sibling in missing if not _has_right_size(target / sibling.rfilename, sibling)])
    free = disk_free_bytes(str(existing))
    if free is not None and needed > (
        free := free + _total_bytes(_unfinished_files(target))
    ):  # incomplete files are deleted
        raise UserError(
            f"--to: {target} has {format_size(free)} free, but {format_size(needed)} are needed; name a directory on another disk"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
