"""What a probe ran with: versions, GPUs, and how the allocator fared. Reads no environment."""

import importlib.metadata
import platform
import re
from pathlib import Path

import torch

from llama405b.contract.probes import Software

DRIVER = Path("/proc/driver/nvidia/version")
PEAKS = ("allocated_bytes", "reserved_bytes")
COUNTS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
GIB = 2**30


def uses_gpu(device: str) -> bool:
    """Whether what is asked to run on ``device``, auto or cpu, does on a GPU."""
    return device != "cpu" and torch.cuda.is_available()


def software() -> Software:
    """Return the versions of what runs here, and its GPUs."""
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if cuda else 0)]
    return Software(
        node=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        transformers=importlib.metadata.version("transformers"),
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        driver=driver_version(),
        gpus=tuple(f"{each.name}, {each.total_memory / GIB:.1f} GiB" for each in devices),
    )


def driver_version(path: Path = DRIVER) -> str:
    """Return the version of NVIDIA's kernel module, "" if there is none; it has two forms, that of open modules and the older one."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", first)
    return version[1] if version else ""


def allocator_stats(*, on_gpu: bool) -> dict[str, int]:
    """Return torch's statistics of this rank's GPU and of the memory that it pinned, in bytes and calls."""
    if not on_gpu:
        return {}
    of_device, of_host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    stats = {f"{name}_peak": of_device[f"{name}.all.peak"] for name in PEAKS} | {
        name: of_device[name] for name in COUNTS
    }
    return stats | {"pinned_bytes_peak": of_host["allocated_bytes.peak"], "num_host_alloc": of_host["num_host_alloc"]}
