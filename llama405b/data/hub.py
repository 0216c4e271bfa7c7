"""Read the files of a Hugging Face Hub dataset over the network, and turn the Hub's errors into sentences.

Knows huggingface_hub; not what a file contains.
"""

import contextlib
import dataclasses
import errno
import fnmatch
import io
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

from llama405b.contract.errors import RunError, UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from huggingface_hub.hf_api import RepoSibling

PLAIN_PATTERNS = ("*.jsonl", "*.ndjson", "*.txt", "*.csv", "*.tsv")
TEXT_PATTERNS = (*PLAIN_PATTERNS, *(f"{kind}.gz" for kind in PLAIN_PATTERNS), "*.md", "*.parquet")
ADDRESS = re.compile(r"hf://datasets/(?P<name>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<only>.+))?")
CLIENT_MODULES = re.compile(r"httpx|httpcore|requests|urllib3")
RANGE_BYTES = 8 << 20  # minimum size of a range request


class HubStat(NamedTuple):
    """The part of ``os.stat_result`` that is used."""

    st_size: int
    st_mtime_ns: int = 0  # a commit never changes


@dataclasses.dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a dataset at a commit, read over the network like a local file and never stored."""

    dataset: str  # owner/name
    commit: str
    path: str
    size: int

    def __str__(self) -> str:
        return f"hf://datasets/{self.dataset}@{self.commit[:8]}/{self.path}"

    @property
    def name(self) -> str:
        """Name of the file, without directories."""
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        """Suffix of the name, with the dot."""
        return PurePosixPath(self.path).suffix

    def stat(self) -> HubStat:
        """Return the size."""
        return HubStat(self.size)

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        """Open for reading. Ranges are requested as they are read, and again if the network fails for seconds."""
        from huggingface_hub import HfFileSystem

        with _as_os_errors():
            repo_path = f"datasets/{self.dataset}@{self.commit}/{self.path}"
            ranges = HfFileSystem().open(repo_path, mode, block_size=RANGE_BYTES, size=self.size)
            return io.BufferedReader(_RangeFile(ranges))


class _RangeFile(io.RawIOBase):
    """A file of the Hub that raises OSError like a local file."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self.file.seek(offset, whence))

    def tell(self) -> int:
        return int(self.file.tell())

    def readinto(self, into: "WriteableBuffer") -> int:
        view = memoryview(into)
        with _as_os_errors():
            content = self.file.read(len(view))
        # A server that ignores range requests fills the cache beyond the end of the file.
        if self.file.cache.end > self.file.size:
            raise OSError("the Hub sends whole files instead of the requested ranges")
        view[: len(content)] = content
        return len(content)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or _is_network_error(error):
            raise OSError(" ".join(str(error).split())[:200] or type(error).__name__) from None
        raise


def hub_files(path: str) -> list[HubFile]:
    """Return the files of ``hf://datasets/OWNER/NAME[@REVISION][/GLOB]``; no glob: all texts and tables."""
    if not (match := ADDRESS.fullmatch(path)):
        raise UserError(f"--data.paths: {path!r} is not hf://datasets/OWNER/NAME[@REVISION][/GLOB]; correct it")
    name = match["name"]
    with explain_hub_errors(f"datasets/{name}", Path()):
        commit, files = dataset_files(name, match["revision"] or "main", match["only"])
    return [HubFile(name, commit, file.rfilename, file.size or 0) for file in files]


def dataset_files(name: str, revision: str, pattern: str | None) -> "tuple[str, list[RepoSibling]]":
    """Return a dataset's commit and its files, sorted: those that match a glob, or all texts and tables.

    Raises:
        UserError: The dataset has no such file.
        Exception: As huggingface_hub raises it; see ``explain_hub_errors``.
    """
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(name, revision=revision, files_metadata=True)
    repo_files = sorted(
        (file for file in info.siblings or () if file.rfilename != "README.md"), key=lambda file: str(file.rfilename)
    )
    patterns = [pattern] if pattern else TEXT_PATTERNS
    files = [file for file in repo_files if any(fnmatch.fnmatch(file.rfilename, glob) for glob in patterns)]
    if not files:
        examples = ", ".join(file.rfilename for file in repo_files[:5])
        raise UserError(
            f"{name}: has no file {pattern or 'of text or Parquet'} (it has {examples or 'none'}); name some of them"
        )
    return str(info.sha), files


@contextlib.contextmanager
def explain_hub_errors(repo: str, target: Path) -> Iterator[None]:
    """Turn errors of huggingface_hub into one sentence.

    ``repo``: owner/name, or datasets/owner/name; ``target``: the path that is written, named if the disk is full.

    Raises:
        UserError: The model does not exist, or access is denied.
        RunError: The network or the disk failed.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if explained := _access_error(error, repo) or _transfer_error(error, repo, target):
            raise explained from None
        raise


def _access_error(error: Exception, repo: str) -> UserError | None:
    """Return an error if the model does not exist or this user has no access."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo}"
    for error_type, sentence in (  # the first is a subclass of the last
        (
            errors.GatedRepoError,
            f"{repo}: access is gated (403); accept the license at {page}, then export the HF_TOKEN of that account",
        ),
        (errors.RevisionNotFoundError, f"--revision: {repo} has no such revision; see {page}/commits"),
        (
            errors.RepositoryNotFoundError,
            f"{repo}: not found on the Hub, or private (401); check the name, or export HF_TOKEN",
        ),
    ):
        if isinstance(error, error_type):
            return UserError(sentence)
    return None


def _transfer_error(error: Exception, repo: str, target: Path) -> RunError | None:
    """Return an error if the network or the disk failed."""
    from huggingface_hub import errors

    causes, text = list(_causes(error)), " ".join(str(error).split())[:200]
    if any(isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause in causes):
        return RunError(f"{target}: the disk is full; free space, then run the same command again")
    if isinstance(error, errors.HfHubHTTPError):
        return RunError(f"{repo}: the Hub refused ({text}); run the same command again")
    if isinstance(error, OSError) and error.filename:
        return RunError(f"{error.filename}: {error.strerror}; fix that, then run the same command again")
    if isinstance(error, OSError) or _is_network_error(error):
        return RunError(f"the Hub cannot be reached ({text}); check the network, then run the same command again")
    return None


def _is_network_error(error: BaseException) -> bool:
    """Return whether an error comes from the HTTP client: a failed connection, a timeout, a truncated reply."""
    return any(CLIENT_MODULES.match(type(cause).__module__) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
