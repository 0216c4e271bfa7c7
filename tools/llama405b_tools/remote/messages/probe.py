"""What launch must know about a host before it starts anything. Pure."""

import dataclasses
import enum
from collections.abc import Mapping

from llama405b.contract.checkpoints import RunIdentity
from llama405b.contract.schema import Adapter
from llama405b.contract.weights import Llama
from llama405b_tools.machine.network import Address, Rdma


@dataclasses.dataclass(frozen=True, slots=True)
class InputCheck:
    """The checkpoint and the data that rank 0 will read, what they must fit, and where the run will save."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Ask what launch must know about this host."""

    run: str
    host: str
    port: int
    token: str
    packages: tuple[str, ...]
    places: Mapping[str, str]  # cache and scratch from the hosts file, and the checkpoints' directory
    is_head: bool = False
    candidates: tuple[str, ...] = ()  # addresses that the head may have
    inputs: InputCheck | None = None
    weights: str = ""  # directory of the checkpoint to look for; "": none
    extras: tuple[str, ...] = ()  # packages that the settings need there, in whatever version
    program: tuple[str, ...] = ()  # of the user's own, to look for; (): none, or it cannot be known before it runs
    shared: str = ""  # the directory of checkpoints, if all hosts must see the same one
    extension: str = ""  # the user's module that the settings name; "": none


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """The route from a host to an address of the head."""

    fault: str  # "": it answers with its token
    mine: str = ""  # its own address on the route there
    interface: str = ""  # of that address
    unresolved: bool = False  # the fault is that the name has no address there


class PlaceFault(enum.StrEnum):
    """Why a directory can be neither written nor created."""

    NO_DIRECTORY = "no directory"
    DANGLING = "dangling"  # a link to nothing
    DENIED = "denied"
    READ_ONLY = "read-only"  # its filesystem, for everybody


@dataclasses.dataclass(frozen=True, slots=True)
class RunPlace:
    """A directory's full path, and what stands in the way of writing or creating it, if anything."""

    path: str
    fault: PlaceFault | None = None
    at: str = ""  # the path at fault: itself, or the nearest above it that exists
    owner: str = ""  # of that
    free_bytes: int = 0  # there, if nothing stands in the way


@dataclasses.dataclass(frozen=True, slots=True)
class Resumable:
    """A checkpoint that the run would go on from."""

    path: str
    identity: RunIdentity


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
    head: Mapping[str, Reach]  # by address of the head
    workdir: str
    run_place: RunPlace
    places: Mapping[str, RunPlace]
    free_bytes: int
    free_files: int | None  # None: the filesystem has no limit
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
    resumable: Resumable | None = None  # on the head; None: there is none, or it does not say what it is of
