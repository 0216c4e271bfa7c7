"""What launch must know about a host before it starts anything there. Runs on the host; standard library only.

Changes nothing, but for a file that the head leaves while the others look for it.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from llama405b.contract import corpus, reader, weights
from llama405b.contract.adapters import read_peft
from llama405b.contract.checkpoints import (
    MANIFEST,
    committed,
    named_path,
    newest_complete,
    read_manifest,
    refuse_held,
)
from llama405b.contract.code_version import code_version
from llama405b.contract.config import DEMO_MODEL
from llama405b.contract.errors import UserError
from llama405b.contract.extension import declared
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import given, last_of
from llama405b.contract.plan import read_plan
from llama405b.contract.tensors import read_tensors
from llama405b.contract.trust import user_of
from llama405b_tools.machine.gpus import GpuReport, read_smi
from llama405b_tools.machine.network import Address, Rdma
from llama405b_tools.remote import hostprobe, processes
from llama405b_tools.remote.describe import stop_mark
from llama405b_tools.remote.locks import is_alive, live_names, run_of, runs
from llama405b_tools.remote.messages.probe import (
    InputCheck,
    LaunchFacts,
    PlaceFault,
    ProbeRequest,
    Reach,
    Resumable,
    RunPlace,
)

GPU_FIELDS = ("index", "name", "memory.total")
READS_TABLES = ("llama405b.data.tables", "first_rows")  # the trainer's, which needs pyarrow
VERSION_WITHIN_S = 30  # for `tmux -V` on a busy machine


def probe(request: ProbeRequest) -> None:
    """Print what launch must know about this host; the head keeps listening for the others until its input closes.

    Starts nothing.
    """
    facts, shared = _facts(request), str(Path(request.shared).expanduser()) if request.shared else ""
    if not request.is_head:
        shares = hostprobe.sees_mark(shared, request.token) if shared else None
        print(reader.dumps(dataclasses.replace(facts, shares=shares)), flush=True)
        return
    port = hostprobe.Listener(request.port, request.token)
    mark = hostprobe.leave_mark(shared, request.token)
    try:
        facts = dataclasses.replace(facts, port_fault=port.fault, port_in_use=port.in_use, shares=bool(mark) or None)
        print(reader.dumps(facts), flush=True)
        sys.stdin.read()
    finally:
        hostprobe.remove_mark(mark)


def _facts(request: ProbeRequest) -> LaunchFacts:
    run, host = run_of(request.run), request.host
    plan, disk = read_plan(run), os.statvfs("runs" if Path("runs").exists() else ".")
    own, mark = addresses(), stop_mark(run, host)
    fault, llama = _look_at(request.inputs)
    extension, extension_fault = _extension(request.extension)
    found, gpu_fault = gpus()
    gpu, gpu_bytes = first_gpu(found)
    others = [path for path in run.path.parent.glob("*") if path.name != run.name]
    return LaunchFacts(
        versions=_versions(request.packages) | extension,
        lacks=tuple(name for name in request.extras if version_of(name) == "missing"),
        extension_fault=extension_fault,
        tmux=shutil.which("tmux") is not None,
        tmux_fault=tmux_fault(),
        ip=shutil.which("ip") is not None,
        run_exists=run.path.exists(),
        attempt=plan.attempt,
        owner=plan.owner,
        alive=runs(run, host),
        alive_as=tuple(live_names(run, {host})),
        others=tuple(path.name for path in others if live_names(RunDir(path), set())),
        leftovers=() if is_alive(run, host) else tuple(processes.marked(f"{run.path}:{host}")),
        machine=_machine_id(),
        gpus=len(found),
        gpu_fault=gpu_fault,
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        rdma=rdma_ports(),
        cores=len(os.sched_getaffinity(0)),
        port_fault="",
        port_in_use=False,
        own=own,
        head={address: _reach(request, address, own) for address in request.candidates},
        workdir=str(Path.cwd()),
        run_place=place_of(str(run.path)),
        places={key: place_of(path) for key, path in request.places.items()},
        free_bytes=disk.f_bavail * disk.f_frsize,
        free_files=disk.f_favail if disk.f_files else None,
        input_fault=fault,
        llama=llama,
        has_program=has_program(request.program),
        stopped_by=mark.by,
        stopped_at=mark.time,
        uid=os.getuid(),
        user=user_of(os.getuid()),
        runs=_identity(Path("runs")),
        weights_bytes=_weights_bytes(request.weights),
        resumable=resumable(request.inputs.resume, request.inputs.checkpoints) if request.inputs else None,
    )


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions in which hosts must agree."""
    python = ".".join(platform.python_version_tuple()[:2])  # patch releases are compatible
    others = {name: version_of(name) for name in packages}
    return {"python": python, **others, "llama405b": code_version()}


def _extension(module: str) -> tuple[dict[str, str], str]:
    """The user's module with its hash, and why it cannot be used."""
    try:
        found = declared(module)
    except UserError as error:
        return {}, str(error)
    return {found.name: found.sha256[:12]} if found.path else {}, ""


def resumable(resume: str, checkpoints: str) -> Resumable | None:
    """Return the checkpoint that a run would go on from; if it cannot be read, the trainer says so."""
    if resume == "no":
        return None
    root = Path(checkpoints)
    path = newest_complete(root) if resume == "auto" else named_path(root, resume)
    with contextlib.suppress(OSError, reader.MalformedError):
        if path and (identity := read_manifest((path / MANIFEST).read_bytes())[0].identity):
            return Resumable(str(path), identity)
    return None


def _weights_bytes(path: str) -> int:
    """Bytes of the tensors that are here; 0 if they cannot be loaded."""
    if path:
        with contextlib.suppress(UserError, OSError):
            return sum(info.held_bytes for info in read_tensors(Path(path).expanduser()).values())
    return 0


def _identity(directory: Path) -> str:
    """What is equal wherever one directory is seen: not its path, nor its device, which network filesystems choose."""
    there = directory if directory.exists() else directory.parent
    info, disk = there.stat(), os.statvfs(there)
    return f"{info.st_ino} {info.st_uid} {info.st_mode} {disk.f_blocks * disk.f_frsize}"


def rdma_ports() -> Rdma:
    """This host's RDMA devices."""
    return reader.read(Rdma, hostprobe.rdma(), "rdma")


def addresses() -> tuple[Address, ...]:
    """This host's own IPv4 addresses."""
    return tuple(reader.read(Address, each, "an address") for each in hostprobe.network()["addresses"])


def _reach(request: ProbeRequest, address: str, own: tuple[Address, ...]) -> Reach:
    """The route to an address of the head, with this host's own address and interface on it."""
    found = reader.read(Reach, hostprobe.reach(address, request.port, request.token), address)
    interface = next((entry.interface for entry in own if entry.address == found.mine), "")
    return dataclasses.replace(found, interface="lo" if found.mine.startswith("127.") else interface)


def place_of(path: str) -> RunPlace:
    """The full path of a directory that the run writes to, and what stands in the way of that."""
    full = Path(path).expanduser()
    there = next(parent for parent in (full, *full.parents) if os.path.lexists(parent))
    if not there.exists():
        return RunPlace(str(full), PlaceFault.DANGLING, str(there))
    if not there.is_dir():
        return RunPlace(str(full), PlaceFault.NO_DIRECTORY, str(there))
    disk = os.statvfs(there)
    if disk.f_flag & os.ST_RDONLY:
        return RunPlace(str(full), PlaceFault.READ_ONLY, str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        return RunPlace(str(full), PlaceFault.DENIED, str(there), user_of(there.stat().st_uid))
    return RunPlace(str(full), free_bytes=disk.f_bavail * disk.f_frsize)


def tmux_fault() -> str:
    """What tmux answers if it does not work; "" if it does, or is not installed."""
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
    """A package's version here, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _machine_id() -> str:
    """An ID that is equal for two hosts of the hosts file that are one machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + socket.gethostname()
    return socket.gethostname()


def gpus() -> tuple[Sequence[GpuReport], str]:
    """The GPUs that work, and why others may not ('' if nvidia-smi is not installed)."""
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    found, fault = read_smi(hostprobe.run(query), GPU_FIELDS)  # type: ignore[no-untyped-call]
    broken = next((f"GPU {gpu.index}: {gpu.fault}" for gpu in found if gpu.fault), "")
    return [gpu for gpu in found if not gpu.fault], fault or broken


def first_gpu(found: Sequence[GpuReport]) -> tuple[str, int]:
    """The first GPU's name and memory in bytes; '' and 0 if nvidia-smi does not say."""
    return next(((gpu.name, gpu.memory_mib << 20) for gpu in found if gpu.memory_mib), ("", 0))


def has_program(program: Sequence[str]) -> bool:
    """Whether torchrun finds a program here, in the working directory; runs nothing of it."""
    match program:
        case ["-m" | "--module", module, *_]:
            with contextlib.suppress(ValueError):  # an odd name: let torchrun say so
                return importlib.util.find_spec(module.partition(".")[0]) is not None
        case [script, *_] if not script.startswith("-"):
            return Path(script).is_file()
    return True


def _look_at(check: InputCheck | None) -> tuple[str, weights.Llama | None]:
    """'' if rank 0 can use the checkpoint, the data and where it will save, else the trainer's own sentence; and the model's shape."""
    llama = None
    if check is None:
        return "", llama
    try:
        if check.model != DEMO_MODEL or Path(check.model).exists():  # rank 0 creates the demo's
            llama = weights.check_checkpoint(
                Path(check.model), check.seq_len, check.layers, random=check.random, whole=check.whole
            )
        if check.adapter and llama:
            read_peft(Path(check.adapter.path), llama, check.adapter)
        if check.template:
            corpus.check_template(Path(check.template))
        has_template = bool(check.template) or weights.has_chat_template(Path(check.model))
        corpus.check_paths(
            check.data,
            check.fields,
            skip=check.skips,
            has_template=has_template,
            first_rows=_first_rows,
            passes=declared(check.extension).reads_file,
        )
        if directory := check.new_checkpoints:
            with contextlib.suppress(OSError):  # if it cannot be read, the trainer says so
                refuse_held(Path(directory), committed(Path(directory)))
    except UserError as error:
        return str(error), llama
    return "", llama


def _first_rows(raw: BinaryIO, fields: Sequence[str]) -> Iterator[reader.Json]:
    """The first rows of a table; nothing where pyarrow is not installed."""
    module, function = READS_TABLES
    try:
        read = getattr(importlib.import_module(module), function)
    except ImportError:
        return
    yield from read(raw, fields)
