"""Hardware as data: what a GPU is by its data sheet, from ``hardware.toml`` and a user's own file. Standard library alone."""

import dataclasses
import math
import re
import tomllib
from pathlib import Path

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import did_you_mean, reason_of

TABLE = Path(__file__).with_name("hardware.toml")
GIB = 1 << 30
ABOUT = 0.1
USUAL = "h100-80"
USUAL_RAM = 614.4  # GB/s of a host's memory: two sockets with eight channels of DDR5-4800
LARGEST = 1e9  # of any number in the file


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, as its data sheet has it; B/s in one direction."""

    name: str
    memory_bytes: float
    flops: float  # dense, BF16, per second
    memory_bytes_per_s: float
    peers_bytes_per_s: float  # to the other GPUs of its host
    host_bytes_per_s: float  # to host memory
    ram_bytes_per_s: float  # of its host's memory, all sockets
    product: str = ""  # what nvidia-smi's name of it contains
    per_host: int = 8
    fp8_flops: float = 0.0  # dense; 0: it has none

    @classmethod
    def of_cpu(cls, memory_bytes: float) -> "Gpu":
        """Return what stands in for a GPU where ranks train on CPUs, of which no data sheet tells anything."""
        return cls("cpu", memory_bytes, *(math.inf,) * 5)

    @property
    def is_cpu(self) -> bool:
        """Whether it only stands in for one."""
        return math.isinf(self.flops)


def read_gpus(own: Path | None = None) -> dict[str, Gpu]:
    """Return the GPUs of the table, and of a file of the user's in the same form, by name.

    Raises:
        UserError: The file cannot be read, or lacks a number.
    """
    return _parsed(TABLE) | (_parsed(own) if own else {})


def gpu_named(name: str, gpus: dict[str, Gpu]) -> Gpu:
    """Return a GPU; a name without what follows the first hyphen is that of the usual kind, or of the only one.

    Raises:
        UserError: It is not in the table, or several are of that name.
    """
    kinds = [kind for kind in gpus if kind.partition("-")[0] == name.lower()]
    for kind in (name, name.lower(), USUAL if USUAL in kinds else "", *kinds[: len(kinds) == 1]):
        if kind in gpus:
            return gpus[kind]
    if kinds:
        raise UserError(f"--gpu: {name!r} is one of several; use {' or '.join(kinds)}")
    raise UserError(
        f"--gpu: {name!r} is not known{did_you_mean(name, gpus)}; known are {', '.join(gpus)}; see --hardware"
    )


def gpu_like(name: str, memory_bytes: float, gpus: dict[str, Gpu]) -> Gpu | None:
    """Return the GPU that nvidia-smi calls by this name, with about this much memory; None: it is not in the table."""
    products = {word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word}
    found = [gpu for gpu in gpus.values() if gpu.product.upper() in products]
    near = [gpu for gpu in found if abs(gpu.memory_bytes / memory_bytes - 1) < ABOUT]
    return min(near, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None)


def _number(gpu: dict[str, object], key: str) -> float:
    found = float(str(gpu[key]))
    if not 0 < found <= LARGEST:
        raise ValueError(f"{key} is {found:g}")
    return found


def _parsed(file: Path) -> dict[str, Gpu]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        return {
            name: Gpu(
                name, _number(gpu, "memory_gib") * GIB, _number(gpu, "tflops") * 1e12, _number(gpu, "hbm_gb_s") * 1e9,
                _number(gpu, "nvlink_gb_s") * 1e9, _number(gpu, "pcie_gb_s") * 1e9,
                _number({"ram_gb_s": USUAL_RAM} | gpu, "ram_gb_s") * 1e9, str(gpu.get("product", "")),
                max(1, round(_number({"gpus_per_host": 8} | gpu, "gpus_per_host"))),
                _number(gpu, "fp8_tflops") * 1e12 if "fp8_tflops" in gpu else 0.0,
            )
            for name, gpu in table["gpu"].items()
        }  # fmt: skip
    except OSError as error:
        raise UserError(f"--hardware: {file}: cannot be read ({reason_of(error)}); correct the path") from None
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UserError(f"--hardware: {file}: {error}; write [gpu.NAME] with the fields of {TABLE}") from None
