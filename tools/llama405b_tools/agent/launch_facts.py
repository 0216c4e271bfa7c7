"""What launch must know about a host before it starts anything there, and how the host finds it out.

Changes nothing, except for a canary file that the head writes while the other hosts look for it.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from llama405b.contract import disk, reader
from llama405b.contract.checkpoints import list_committed, refuse_existing
from llama405b.contract.errors import UserError
from llama405b.contract.extension import read_extension
from llama405b.contract.files import user_name
from llama405b.contract.paths import RunDir
from llama405b.contract.software import code_version
from llama405b.formats import corpus
from llama405b.settings.config import DEMO_MODEL
from llama405b.settings.schema import Adapter
from llama405b.spec import models
from llama405b.spec.adapters import read_peft
from llama405b.spec.models import Llama
from llama405b.spec.plan import read_plan
from llama405b.spec.tensors import read_tensors
from llama405b_tools.agent import facts, hostprobe, processes
from llama405b_tools.agent.describe import read_stop_mark
from llama405b_tools.agent.machine import (
    DirectoryCheck,
    ResumeCheckpoint,
    check_writable_directory,
    directory_identity,
    find_resume_checkpoint,
    first_gpu,
    has_program,
    list_addresses,
    list_working_gpus,
    package_version,
    rdma_ports,
    tmux_fault,
)
from llama405b_tools.agent.processes import find_live_names, is_alive, is_run_active, resolve_run_dir
from llama405b_tools.parsers import Address, Rdma


@dataclasses.dataclass(frozen=True, slots=True)
class InputCheck:
    """The checkpoint and data that rank 0 will read, what they must fit, and where the run will save."""

    model: str
    seq_len: int
    layers: int
    random: bool
    data: tuple[str, ...]
    new_checkpoints: str = ""  # the directory that must hold no checkpoint
    whole: bool = False  # a part of the weights is not enough
    template: str = ""  # the file of a chat template; "": the tokenizer's own
    resume: str = "no"  # no, auto, a step or a path
    checkpoints: str = ""  # where auto and steps are
    fields: tuple[str, ...] = ()  # as data.fields says it
    skips: bool = False  # records that cannot be used
    adapter: Adapter | None = None  # that one at its path must be
    extension: str = ""  # the user's module, which reads some files itself
    resize: bool = False  # the embedding grows


CHECKPOINTS = "--checkpoint.dir"  # if it is not below the run's directory
EXPORT = "--export"


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Ask for what launch must know about this host."""

    run: str
    host: str
    port: int
    token: str
    packages: tuple[str, ...]
    places: Mapping[str, str]  # cache and scratch from the hosts file, CHECKPOINTS and EXPORT
    candidates: tuple[str, ...] = ()  # addresses that the head may have
    inputs: InputCheck | None = None
    weights: str = ""  # directory of the checkpoint to look for; "": none
    extras: tuple[str, ...] = ()  # packages that the settings need there, in whatever version
    program: tuple[str, ...] = ()  # of the user's own, to look for; (): none, or it cannot be known before it runs
    shared: str = ""  # the directory of checkpoints, if all hosts must see the same one
    extension: str = ""  # the user's module that the settings name; "": none
    saves: bool = False  # checkpoints


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRoute:
    """The route from a host to an address of the head."""

    fault: str  # "": it answers with its token
    mine: str = ""  # its own address on the route there
    interface: str = ""  # of that address
    unresolved: bool = False  # the fault is that the name has no address there


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchFacts:
    """What launch must know about a host."""

    versions: Mapping[str, str]
    tmux: bool
    tmux_fault: str  # what it answers if it does not work; "": it does
    ip: bool
    run_exists: bool
    attempt: int
    owner: str
    alive: bool
    others: tuple[str, ...]  # names of other runs that are alive here
    leftovers: tuple[int, ...]
    machine: str
    gpus: int
    rdma: Rdma
    cores: int
    port_fault: str  # of the requested port, on the head
    port_in_use: bool
    own: tuple[Address, ...]
    head: Mapping[str, HeadRoute]  # by address of the head
    workdir: str
    run_place: DirectoryCheck
    places: Mapping[str, DirectoryCheck]
    free_bytes: int | None  # None: unknown
    free_files: int | None  # None: no limit, or unknown
    input_fault: str  # "": checkpoint and data can be used, or were not checked
    alive_as: tuple[str, ...] = ()  # other names of this host under which the run is alive here
    has_program: bool = True  # or was not asked for it
    stopped_by: str = ""  # who is stopping the run, or has
    stopped_at: float = 0.0  # by the host's clock; 0: nobody has
    uid: int = 0  # of the user that the run gets here
    user: str = ""  # its name
    weights_bytes: int = 0  # of the checkpoint's tensors, or of a part's; 0: it is not here, or was not looked for
    runs: str = ""  # equal on hosts that share the directory of runs
    llama: Llama | None = None  # the model's shape, on the head; None: not known
    lacks: tuple[str, ...] = ()  # of the extras
    extension_fault: str = ""  # why the user's module cannot be used
    gpu_fault: str = ""  # why it may have more GPUs than it lists
    gpu: str = ""  # the first one's name
    gpu_bytes: int = 0  # its memory
    memory_bytes: int = 0  # of the host
    shares: bool | None = None  # whether it sees what the head wrote for ``shared``; None: unknown
    resumable: ResumeCheckpoint | None = None  # on the head; None: there is none, or it does not say what it is of


TABLE_READER = ("llama405b.data.documents", "first_rows")  # the trainer's, which needs pyarrow


def probe(request: ProbeRequest) -> LaunchFacts:
    """Return what launch must know about a host other than the head; starts nothing."""
    shared_directory = _shared_directory(request)
    shares = hostprobe.sees_canary(shared_directory, request.token) if shared_directory else None
    return dataclasses.replace(_collect_facts(request), shares=shares)


def probe_head(request: ProbeRequest) -> None:
    """Print what launch must know about the head, and listen for the other hosts until its input closes."""
    launch_facts, shared_directory = _collect_facts(request), _shared_directory(request)
    listener = hostprobe.Listener(request.port, request.token)
    canary = hostprobe.write_canary(shared_directory, request.token)
    try:
        launch_facts = dataclasses.replace(
            launch_facts, port_fault=listener.fault, port_in_use=listener.in_use, shares=bool(canary) or None
        )
        print(reader.dumps(launch_facts), flush=True)
        sys.stdin.read()
    finally:
        hostprobe.remove_canary(canary)


def _shared_directory(request: ProbeRequest) -> str:
    return str(Path(request.shared).expanduser()) if request.shared else ""


def _collect_facts(request: ProbeRequest) -> LaunchFacts:
    run, host = resolve_run_dir(request.run), request.host
    plan, disk_path = read_plan(run), "runs" if Path("runs").exists() else "."
    own_addresses, stop_record = list_addresses(), read_stop_mark(run, host)
    input_fault, llama = _check_inputs(request.inputs)
    extension, extension_fault = _check_extension(request.extension)
    working_gpus, gpu_fault = list_working_gpus()
    gpu, gpu_bytes = first_gpu(working_gpus)
    other_runs = [path for path in run.path.parent.glob("*") if path.name != run.name]
    return LaunchFacts(
        versions=_collect_versions(request.packages) | extension,
        lacks=tuple(name for name in request.extras if package_version(name) == "missing"),
        extension_fault=extension_fault,
        tmux=shutil.which("tmux") is not None,
        tmux_fault=tmux_fault(),
        ip=shutil.which("ip") is not None,
        run_exists=run.path.exists(),
        attempt=plan.attempt,
        owner=plan.owner,
        alive=is_run_active(run, host),
        alive_as=tuple(find_live_names(run, {host})),
        others=tuple(path.name for path in other_runs if find_live_names(RunDir(path), set())),
        leftovers=() if is_alive(run, host) else tuple(processes.find_marked(f"{run.path}:{host}")),
        machine=facts.machine_name(),
        gpus=len(working_gpus),
        gpu_fault=gpu_fault,
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        rdma=rdma_ports(),
        cores=len(os.sched_getaffinity(0)),
        port_fault="",
        port_in_use=False,
        own=own_addresses,
        head={address: _find_route(request, address, own_addresses) for address in request.candidates},
        workdir=str(Path.cwd()),
        run_place=check_writable_directory(
            str(run.path), for_checkpoints=request.saves and CHECKPOINTS not in request.places
        ),
        places={
            key: check_writable_directory(path, for_checkpoints=key == CHECKPOINTS, for_appends=key != EXPORT)
            for key, path in request.places.items()
        },
        free_bytes=disk.disk_free_bytes(disk_path),
        free_files=disk.disk_free_files(disk_path),
        input_fault=input_fault,
        llama=llama,
        has_program=has_program(request.program),
        stopped_by=stop_record.by,
        stopped_at=stop_record.time,
        uid=os.getuid(),
        user=user_name(os.getuid()),
        runs=directory_identity(Path("runs")),
        weights_bytes=_weights_bytes(request.weights),
        resumable=find_resume_checkpoint(request.inputs.resume, request.inputs.checkpoints) if request.inputs else None,
    )


def _collect_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions in which hosts must agree."""
    python = ".".join(platform.python_version_tuple()[:2])  # patch releases are compatible
    versions = {name: package_version(name) for name in packages}
    return {"python": python, **versions, "llama405b": code_version()}


def _check_extension(module: str) -> tuple[dict[str, str], str]:
    """Return the user's module with its hash, and why it cannot be used."""
    try:
        extension = read_extension(module)
    except UserError as error:
        return {}, str(error)
    return {extension.name: extension.sha256[:12]} if extension.path else {}, ""


def _weights_bytes(path: str) -> int:
    """Return the bytes of the tensors on this host; 0 if they cannot be loaded."""
    if path:
        with contextlib.suppress(UserError, OSError):
            return sum(info.stored_bytes for info in read_tensors(Path(path).expanduser()).values())
    return 0


def _find_route(request: ProbeRequest, address: str, own_addresses: tuple[Address, ...]) -> HeadRoute:
    """Return the route to an address of the head, with this host's own address and interface on it."""
    route = reader.build_record(HeadRoute, hostprobe.probe_peer(address, request.port, request.token), address)
    interface = next((entry.interface for entry in own_addresses if entry.address == route.mine), "")
    return dataclasses.replace(route, interface="lo" if route.mine.startswith("127.") else interface)


def _check_inputs(check: InputCheck | None) -> tuple[str, models.Llama | None]:
    """Return why rank 0 cannot use its inputs or save directory ('' if it can), and the model's shape.

    The reason is the trainer's own sentence.
    """
    llama = None
    if check is None:
        return "", llama
    try:
        if check.model != DEMO_MODEL or Path(check.model).exists():  # rank 0 creates the demo's
            llama = models.check_checkpoint(
                Path(check.model),
                check.seq_len,
                check.layers,
                random=check.random,
                needs_all=check.whole,
                resize=check.resize,
            )
        if check.adapter and llama:
            read_peft(Path(check.adapter.path), llama, check.adapter)
        if check.template:
            corpus.check_template(Path(check.template))
        has_template = bool(check.template) or models.has_chat_template(Path(check.model))
        corpus.check_paths(
            check.data,
            check.fields,
            skip=check.skips,
            has_template=has_template,
            first_rows=_first_rows,
            is_exempt=read_extension(check.extension).reads_file,
        )
        if directory := check.new_checkpoints:
            with contextlib.suppress(OSError):  # if it cannot be read, the trainer says so
                refuse_existing(Path(directory), list_committed(Path(directory)))
    except UserError as error:
        return str(error), llama
    return "", llama


def _first_rows(raw: BinaryIO, fields: Sequence[str]) -> Iterator[reader.Json]:
    """Yield the first rows of a table; nothing if pyarrow is not installed."""
    module, function = TABLE_READER
    try:
        read_rows = getattr(importlib.import_module(module), function)
    except ImportError:
        return
    yield from read_rows(raw, fields)
