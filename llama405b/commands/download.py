"""``llama405b download``: download a model from the Hugging Face Hub, only what training needs, and verify it.

Run it on the host that needs the weights; only that host needs HF_TOKEN. An interrupted download is resumed. Every
file's size is checked, and its SHA-256 if the Hub has one.
"""

import argparse
import concurrent.futures
import contextlib
import errno
import fnmatch
import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llama405b.contract import weights
from llama405b.contract.command import OneLineParser
from llama405b.contract.errors import RunError, UserError
from llama405b.contract.files import write_json
from llama405b.contract.reader import Json

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

RECORD = ".llama405b-download.json"  # name -> [bytes, mtime_ns, sha256] of verified files
AT_ONCE = 4


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    how = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="llama405b download", description=__doc__, formatter_class=how, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="owner/name, like meta-llama/Llama-3.1-405B")
    parser.add_argument("--to", type=Path, metavar="DIR", help="target directory [models/<name>]")
    parser.add_argument("--revision", default="main", help="a branch, tag or commit [main]")
    parser.add_argument("--skip-weights", action="store_true", help="download only the configuration and tokenizer")
    args = parser.parse(argv)
    if args.model.count("/") != 1:
        raise UserError(f"download: {args.model!r} is not a model name; write owner/name")
    target = args.to or Path("models") / args.model.partition("/")[2]
    fetch(args.model, args.revision, target, skip_weights=args.skip_weights)
    return 0


def fetch(model: str, revision: str, target: Path, *, skip_weights: bool) -> None:
    """Download and verify a model.

    Raises:
        UserError: The model does not exist, access is denied, or the disk is too small.
        RunError: The network or the disk failed; the same command resumes.
    """
    from huggingface_hub import HfApi

    with said_clearly(model, target):
        info = HfApi().model_info(model, revision=revision, files_metadata=True)
        files = [sibling for sibling in info.siblings or () if wanted(sibling.rfilename, skip_weights=skip_weights)]
        if not any(sibling.rfilename == "config.json" for sibling in files):
            raise UserError(f"{model}: has no config.json; only models in Hugging Face format can be trained")
        record = Verified(target)
        lacking = [sibling for sibling in files if not record.holds(sibling)]
        _check_room(target, lacking)
        print(
            f"{model} at {info.sha}: {len(files)} files, {_bytes_of(files) / 1e9:.2f} GB; {len(lacking)} to download into {target}",
            flush=True,
        )
        _fetch_all(model, str(info.sha), lacking, target, record)
    if not skip_weights:
        llama = weights.read_llama(target)
        weights.read_tensors(target)
        print(f"complete: {llama.parameters:,} parameters; train with --model.path {target}")


def _fetch_all(model: str, commit: str, lacking: list["RepoSibling"], target: Path, record: "Verified") -> None:
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [pool.submit(_fetch_one, model, commit, sibling, target, record) for sibling in lacking]
        try:
            for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
                print(f"{done}/{len(lacking)}  {job.result()}: verified", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def wanted(name: str, *, skip_weights: bool) -> bool:
    """Return whether training needs a file: not the original, pickled or consolidated copies of the weights."""
    is_weights = name == weights.INDEX or fnmatch.fnmatch(name, "model*.safetensors")
    return name in weights.SMALL_FILES or (is_weights and not skip_weights and "/" not in name)


def _fetch_one(model: str, commit: str, sibling: "RepoSibling", target: Path, record: "Verified") -> str:
    """Download one file and verify it; if that fails, download it once more in full."""
    from huggingface_hub import hf_hub_download

    name: str = sibling.rfilename
    for again in (False, True):
        path = Path(hf_hub_download(model, name, revision=commit, local_dir=target, force_download=again))
        fault = download_fault(path, sibling)
        if not fault:
            record.add(name, path, digest_of(sibling))
            return name
    raise RunError(f"{path}: {fault}, twice; the disk or the network corrupts data: check them")


def download_fault(path: Path, sibling: "RepoSibling") -> str:
    """Say what is wrong with a file; '' if nothing is."""
    size, digest = path.stat().st_size, digest_of(sibling)
    if sibling.size is not None and size != sibling.size:
        return f"{size} bytes, but the Hub says {sibling.size}"
    if digest:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return "its content does not match the Hub's SHA-256"
    return ""


def digest_of(sibling: "RepoSibling") -> str:
    """Return the SHA-256 that the Hub has for a big file; '' for a small one."""
    lfs = getattr(sibling, "lfs", None)
    if not lfs:
        return ""
    return str(lfs["sha256"] if isinstance(lfs, dict) else getattr(lfs, "sha256", ""))


class Verified:
    """The files of a directory that were verified and have not changed since."""

    def __init__(self, target: Path) -> None:
        self.target, self.lock = target, threading.Lock()  # files are downloaded in parallel
        try:
            self.files: dict[str, list[Json]] = json.loads((target / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.files = {}

    def holds(self, sibling: "RepoSibling") -> bool:
        """Return whether the local file is verified and unchanged."""
        size, mtime, digest = self.files.get(sibling.rfilename, [-1, 0, ""])
        path = self.target / sibling.rfilename
        if not path.is_file() or digest != digest_of(sibling):
            return False
        info = path.stat()
        return (info.st_size, info.st_mtime_ns) == (size, mtime) and sibling.size in (None, size)

    def add(self, name: str, path: Path, digest: str) -> None:
        """Record a verified file."""
        info = path.stat()
        with self.lock:
            self.files[name] = [info.st_size, info.st_mtime_ns, digest]
            write_json(self.target / RECORD, dict(self.files))


def _bytes_of(siblings: Sequence["RepoSibling"]) -> int:
    return sum(sibling.size or 0 for sibling in siblings)


def _check_room(target: Path, lacking: Sequence["RepoSibling"]) -> None:
    here = target
    while not here.exists():
        here = here.parent
    need, free = _bytes_of(lacking), shutil.disk_usage(here).free
    if need > free:
        raise UserError(
            f"--to: {target} has {free / 1e9:.2f} GB free, but {need / 1e9:.2f} GB are needed; name a directory on another disk"
        )


@contextlib.contextmanager
def said_clearly(model: str, target: Path) -> Iterator[None]:
    """Turn errors of huggingface_hub into one sentence.

    Raises:
        UserError: The model does not exist, or access is denied.
        RunError: The network or the disk failed.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if told := _refusal(error, model) or _failure(error, model, target):
            raise told from None
        raise


def _refusal(error: Exception, model: str) -> UserError | None:
    """The error if the model does not exist or this user has no access."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{model}"
    for kind, sentence in (  # the first is a subclass of the last
        (
            errors.GatedRepoError,
            f"{model}: access is gated (403); accept the license at {page}, then export the HF_TOKEN of that account",
        ),
        (errors.RevisionNotFoundError, f"--revision: {model} has no such revision; see {page}/commits"),
        (
            errors.RepositoryNotFoundError,
            f"{model}: not found on the Hub, or private (401); check the name, or export HF_TOKEN",
        ),
    ):
        if isinstance(error, kind):
            return UserError(sentence)
    return None


def _failure(error: Exception, model: str, target: Path) -> RunError | None:
    """The error if the network or the disk failed."""
    from huggingface_hub import errors

    causes, said = list(_causes(error)), " ".join(str(error).split())[:200]
    if any(isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause in causes):
        return RunError(f"{target}: the disk is full; free space, then run the same command to resume")
    if isinstance(error, errors.HfHubHTTPError):
        return RunError(f"{model}: the Hub refused ({said}); run the same command to resume")
    if isinstance(error, OSError) and error.filename:
        return RunError(f"{error.filename}: {error.strerror}; fix that, then run the same command to resume")
    if isinstance(error, OSError) or any("onnect" in type(cause).__name__ for cause in causes):
        return RunError(f"the Hub cannot be reached ({said}); check the network, then run the same command to resume")
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
