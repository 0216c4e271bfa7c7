"""Facts about this host: addresses, GPUs, programs, directories, and the checkpoint from which a run would resume."""

import contextlib
import dataclasses
import enum
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract import disk, reader
from llama405b.contract.checkpoints import MANIFEST, RunIdentity, find_newest_complete, named_path, read_manifest
from llama405b.contract.errors import fmt_if, last_or
from llama405b.contract.files import user_name
from llama405b_tools.agent import hostprobe
from llama405b_tools.parsers import MIG_ON, Address, GpuReport, Rdma, parse_smi


class DirectoryFault(enum.StrEnum):
    """Why a directory can be neither written nor created."""

    NO_DIRECTORY = "no directory"
    DANGLING = "dangling"  # a link to nothing
    DENIED = "denied"
    READ_ONLY = "read-only"  # its filesystem, for everybody
    REFUSES = "refuses"  # its filesystem, a call that a run makes


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryCheck:
    """A directory's full path, and why it cannot be written or created, if it cannot."""

    path: str
    fault: DirectoryFault | None = None
    at: str = ""  # the path at fault: itself, or the nearest above it that exists
    owner: str = ""  # of that
    free_bytes: int | None = None  # there, if nothing stands in the way; None: unknown
    why: str = ""  # what a run cannot do there, and why


@dataclasses.dataclass(frozen=True, slots=True)
class ResumeCheckpoint:
    """A checkpoint from which the run would resume."""

    path: str
    identity: RunIdentity


GPU_FIELDS = ("index", "name", "memory.total", "mig.mode.current")
VERSION_TIMEOUT_S = 30  # for `tmux -V` on a busy machine


def find_resume_checkpoint(resume: str, checkpoints: str) -> ResumeCheckpoint | None:
    """Return the checkpoint from which a run would resume; None if there is none or it is unreadable.

    The trainer reports an unreadable checkpoint itself.
    """
    if resume == "no":
        return None
    root = Path(checkpoints)
    path = find_newest_complete(root) if resume == "auto" else named_path(root, resume)
    with contextlib.suppress(OSError, reader.MalformedError):
        if path and (identity := read_manifest((path / MANIFEST).read_bytes())[0].identity):
            return ResumeCheckpoint(str(path), identity)
    return None


def directory_identity(directory: Path) -> str:
    """Return a string that is equal wherever the same directory is mounted.

    It has neither the path nor the device, which network filesystems choose per host.
    """
    target = directory if directory.exists() else directory.parent
    info, size = target.stat(), os.statvfs(target)
    return f"{info.st_ino} {info.st_uid} {info.st_mode} {size.f_blocks * size.f_frsize}"


def rdma_ports() -> Rdma:
    """Return this host's RDMA devices."""
    return reader.build_record(Rdma, hostprobe.read_rdma(), "rdma")


def list_addresses() -> tuple[Address, ...]:
    """Return this host's own IPv4 addresses."""
    return tuple(
        reader.build_record(Address, address, "an address") for address in hostprobe.read_network()["addresses"]
    )


def check_writable_directory(path: str, *, for_checkpoints: bool = False, for_appends: bool = True) -> DirectoryCheck:
    """Return the full path of a directory that the run writes to, and why it cannot be written; see ``disk.unsupported_operation``."""
    full_path = Path(path).expanduser()
    nearest = next(parent for parent in (full_path, *full_path.parents) if os.path.lexists(parent))
    if not nearest.exists():
        return DirectoryCheck(str(full_path), DirectoryFault.DANGLING, str(nearest))
    if not nearest.is_dir():
        return DirectoryCheck(str(full_path), DirectoryFault.NO_DIRECTORY, str(nearest))
    if os.statvfs(nearest).f_flag & os.ST_RDONLY:
        return DirectoryCheck(str(full_path), DirectoryFault.READ_ONLY, str(nearest))
    if not os.access(nearest, os.W_OK | os.X_OK):
        return DirectoryCheck(str(full_path), DirectoryFault.DENIED, str(nearest), user_name(nearest.stat().st_uid))
    if refusal := disk.unsupported_operation(str(nearest), for_checkpoints, for_appends):
        return DirectoryCheck(str(full_path), DirectoryFault.REFUSES, str(nearest), why=refusal)
    return DirectoryCheck(str(full_path), free_bytes=disk.disk_free_bytes(str(nearest)))


def tmux_fault() -> str:
    """Return tmux's error if it does not work; "" if it works or is not installed."""
    try:
        result = subprocess.run(["tmux", "-V"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return fmt_if("no answer within {} s", getattr(error, "timeout", None)) or str(error)
    if result.returncode == 0 and any(map(str.isdigit, result.stdout)):  # a version
        return ""
    return last_or((result.stderr or result.stdout).strip().splitlines(), f"exit code {result.returncode}")


def package_version(package: str) -> str:
    """Return a package's version here, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def list_working_gpus() -> tuple[Sequence[GpuReport], str]:
    """Return the GPUs that work, and why others may not ('' if nvidia-smi is not installed)."""
    for fields in (GPU_FIELDS, GPU_FIELDS[:-1]):  # drivers before MIG do not know the last
        query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        text = hostprobe.run(query)  # type: ignore[no-untyped-call]
        reports, fault = parse_smi(text, fields)
        if "not a valid field" not in (text or ""):
            break
    first_fault = next((f"GPU {gpu.index}: {gpu.fault}" for gpu in reports if gpu.fault), "")
    working_gpus = [gpu for gpu in reports if not gpu.fault]
    if mig_gpus := [gpu for gpu in working_gpus if gpu.mig]:  # a process sees one part of one of them
        return [gpu for gpu in working_gpus if not gpu.mig] or mig_gpus[
            :1
        ], f"GPU {mig_gpus[0].index}: {'; '.join(MIG_ON)}"
    return working_gpus, fault or first_fault


def first_gpu(reports: Sequence[GpuReport]) -> tuple[str, int]:
    """Return the first GPU's name and memory in bytes; '' and 0 if nvidia-smi does not report them."""
    return next(((gpu.name, gpu.memory_mib << 20) for gpu in reports if gpu.memory_mib), ("", 0))


def has_program(program: Sequence[str]) -> bool:
    """Return whether torchrun finds a program here, in the working directory; runs nothing of it."""
    match program:
        case ["-m" | "--module", module, *_]:
            with contextlib.suppress(ValueError):  # an odd name: let torchrun say so
                return importlib.util.find_spec(module.partition(".")[0]) is not None
        case [script, *_] if not script.startswith("-"):
            return Path(script).is_file()
    return True
