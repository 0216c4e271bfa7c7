"""The machines that a prediction is for: as they were found, or as they are described. Pure."""

import dataclasses
import re
from collections.abc import Mapping

from llama405b.capacity.estimate import DISK_BYTES_PER_S
from llama405b.capacity.hardware import GIB, USUAL, Gpu, gpu_named
from llama405b.contract.errors import UserError

LINK_BYTES_PER_S = 50e9  # of a GPU to other hosts, assumed: 400 Gbit/s
RATE = re.compile(r"([0-9]{1,9}(?:[.][0-9]{1,9})?) *(Gb/s|GB/s)")
SIZE = re.compile(r"([0-9]{1,9}(?:[.][0-9]{1,9})?) *(GiB|TiB)")
UNITS = {"Gb/s": 1e9 / 8, "GB/s": 1e9, "GiB": float(GIB), "TiB": 1024.0 * GIB}


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """What a command line says of machines; 0 or '': nothing."""

    nodes: int = 0
    slots: int = 0
    gpu: str = ""
    ram: str = ""
    nic: str = ""
    disk: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Machines:
    """Hosts that are alike."""

    nodes: int
    slots: int  # 0: as many as hosts with such GPUs have
    gpu: Gpu | None  # None: nvidia-smi reports none
    ram_bytes: float  # 0: unknown
    nic_bytes_per_s: float  # 0: no RDMA link is active
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of packages, on the first

    @property
    def world(self) -> int:
        """Ranks."""
        return self.nodes * self.slots


UNSEEN = Machines(1, 0, None, 0.0, 0.0)  # no host was asked


def described(found: Machines, said: Described, gpus: dict[str, Gpu]) -> Machines:
    """Return the machines that were found, with what is said of them, and assumptions for the rest.

    Raises:
        UserError: It cannot be read, or names a GPU that is not known.
    """
    gpu = gpu_named(said.gpu, gpus) if said.gpu else found.gpu or gpus[USUAL]
    is_usual = not found.slots or (found.gpu is not None and found.slots == found.gpu.per_host)
    slots = gpu.per_host if is_usual else found.slots  # other GPUs come in other numbers
    nic = quantity(said.nic, "--nic", RATE) if said.nic else found.nic_bytes_per_s
    return Machines(
        nodes=said.nodes or found.nodes,
        slots=said.slots or slots,
        gpu=gpu,
        ram_bytes=quantity(said.ram, "--ram", SIZE) if said.ram else found.ram_bytes,
        nic_bytes_per_s=nic or gpu.per_host * LINK_BYTES_PER_S,
        disk_bytes_per_s=quantity(said.disk, "--disk", RATE) if said.disk else found.disk_bytes_per_s,
        versions=found.versions,
    )


def assumptions(found: Machines, said: Described, machines: Machines, *, asked: bool) -> list[str]:
    """Say what is neither found nor described; ``asked``: whether hosts were."""
    assert machines.gpu, "a kind of GPU was chosen"
    assumed = []
    if said.gpu and machines.gpu.name != said.gpu:
        assumed.append(f"--gpu {said.gpu} is {machines.gpu.name}")
    elif not (said.gpu or asked):
        assumed.append(f"GPUs are {machines.gpu.name}")
    if machines.nodes > 1 and not said.nic and not found.nic_bytes_per_s:
        unseen = " (no active RDMA link was found)" if asked else ""
        assumed.append(f"{machines.nic_bytes_per_s * 8 / 1e9:,.0f} Gbit/s a host{unseen}")
    return [f"assumed      {'; '.join(assumed)}"] if assumed else []


def quantity(text: str, option: str, form: re.Pattern[str]) -> float:
    """Read bytes, or bytes per second.

    Raises:
        UserError: It is not a number with a unit.
    """
    if not (match := form.fullmatch(text)) or not float(match[1]):
        known = " or ".join(unit for unit in UNITS if form.fullmatch(f"1{unit}"))
        raise UserError(f"{option}: {text!r} is not a number with {known}; correct it")
    return float(match[1]) * UNITS[match[2]]
