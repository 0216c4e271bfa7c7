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
from llama405b.contract.checkpoints import (
    MANIFEST,
    RunIdentity,
    named_path,
    newest_complete,
    read_manifest,
)
from llama405b.contract.errors import given, last_of
from llama405b.contract.files import user_of
from llama405b_tools.agent import hostprobe
from llama405b_tools.parsers import MIG_ON, Address, GpuReport, Rdma, read_smi


class PlaceFault(enum.StrEnum):
    """Why a directory can be neither written nor created."""

    NO_DIRECTORY = "no directory"
    DANGLING = "dangling"  # a link to nothing
    DENIED = "denied"
    READ_ONLY = "read-only"  # its filesystem, for everybody
    REFUSES = "refuses"  # its filesystem, a call that a run makes


@dataclasses.dataclass(frozen=True, slots=True)
class RunPlace:
    """A directory's full path, and why it cannot be written or created, if it cannot."""

    path: str
    fault: PlaceFault | None = None
    at: str = ""  # the path at fault: itself, or the nearest above it that exists
    owner: str = ""  # of that
    free_bytes: int | None = None  # there, if nothing stands in the way; None: unknown
    why: str = ""  # what a run cannot do there, and why


@dataclasses.dataclass(frozen=True, slots=True)
class Resumable:
    """A checkpoint from which the run would resume."""

    path: str
    identity: RunIdentity


GPU_FIELDS = ("index", "name", "memory.total", "mig.mode.current")
VERSION_WITHIN_S = 30  # for `tmux -V` on a busy machine


def resumable(resume: str, checkpoints: str) -> Resumable | None:
    """Return the checkpoint from which a run would resume; None if there is none or it is unreadable.

    The trainer reports an unreadable checkpoint itself.
    """
    if resume == "no":
        return None
    root = Path(checkpoints)
    path = newest_complete(root) if resume == "auto" else named_path(root, resume)
    with contextlib.suppress(OSError, reader.MalformedError):
        if path and (identity := read_manifest((path / MANIFEST).read_bytes())[0].identity):
            return Resumable(str(path), identity)
    return None


def saved_identity(directory: Path) -> str:
    """Return a string that is equal wherever the same directory is mounted.

    It has neither the path nor the device, which network filesystems choose per host.
    """
    there = directory if directory.exists() else directory.parent
    info, size = there.stat(), os.statvfs(there)
    return f"{info.st_ino} {info.st_uid} {info.st_mode} {size.f_blocks * size.f_frsize}"


def rdma_ports() -> Rdma:
    """Return this host's RDMA devices."""
    return reader.read(Rdma, hostprobe.rdma(), "rdma")


def addresses() -> tuple[Address, ...]:
    """Return this host's own IPv4 addresses."""
    return tuple(reader.read(Address, each, "an address") for each in hostprobe.network()["addresses"])


def place_of(path: str, *, saves: bool = False, appends: bool = True) -> RunPlace:
    """Return the full path of a directory that the run writes to, and why it cannot be written; see ``disk.refused_call``."""
    full = Path(path).expanduser()
    there = next(parent for parent in (full, *full.parents) if os.path.lexists(parent))
    if not there.exists():
        return RunPlace(str(full), PlaceFault.DANGLING, str(there))
    if not there.is_dir():
        return RunPlace(str(full), PlaceFault.NO_DIRECTORY, str(there))
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return RunPlace(str(full), PlaceFault.READ_ONLY, str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        return RunPlace(str(full), PlaceFault.DENIED, str(there), user_of(there.stat().st_uid))
    if why := disk.refused_call(str(there), saves, appends):
        return RunPlace(str(full), PlaceFault.REFUSES, str(there), why=why)
    return RunPlace(str(full), free_bytes=disk.disk_free_bytes(str(there)))


def tmux_fault() -> str:
    """Return tmux's error if it does not work; "" if it works or is not installed."""
    try:
        done = subprocess.run(["tmux", "-V"], capture_output=True, text=True, timeout=VERSION_WITHIN_S, check=False)
    except FileNotFoundError:
        return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return given("no answer within {} s", getattr(error, "timeout", None)) or str(error)
    if done.returncode == 0 and any(map(str.isdigit, done.stdout)):  # a version
        return ""
    return last_of((done.stderr or done.stdout).strip().splitlines(), f"exit code {done.returncode}")


def version_of(package: str) -> str:
    """Return a package's version here, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def gpus() -> tuple[Sequence[GpuReport], str]:
    """Return the GPUs that work, and why others may not ('' if nvidia-smi is not installed)."""
    for fields in (GPU_FIELDS, GPU_FIELDS[:-1]):  # drivers before MIG do not know the last
        query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        text = hostprobe.run(query)  # type: ignore[no-untyped-call]
        found, fault = read_smi(text, fields)
        if "not a valid field" not in (text or ""):
            break
    broken = next((f"GPU {gpu.index}: {gpu.fault}" for gpu in found if gpu.fault), "")
    working = [gpu for gpu in found if not gpu.fault]
    if divided := [gpu for gpu in working if gpu.mig]:  # a process sees one part of one of them
        return [gpu for gpu in working if not gpu.mig] or divided[:1], f"GPU {divided[0].index}: {'; '.join(MIG_ON)}"
    return working, fault or broken


def first_gpu(found: Sequence[GpuReport]) -> tuple[str, int]:
    """Return the first GPU's name and memory in bytes; '' and 0 if nvidia-smi does not report them."""
    return next(((gpu.name, gpu.memory_mib << 20) for gpu in found if gpu.memory_mib), ("", 0))


def has_program(program: Sequence[str]) -> bool:
    """Return whether torchrun finds a program here, in the working directory; runs nothing of it."""
    match program:
        case ["-m" | "--module", module, *_]:
            with contextlib.suppress(ValueError):  # an odd name: let torchrun say so
                return importlib.util.find_spec(module.partition(".")[0]) is not None
        case [script, *_] if not script.startswith("-"):
            return Path(script).is_file()
    return True
