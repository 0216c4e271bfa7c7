"""Parse the output of ``nvidia-smi``. Pure. Unknown values are None, never 0."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from llama405b.contract.phrases import and_more, given
from llama405b.contract.reader import LINES

NOT_TOLD = (
    r"(?:N/A|Not Supported|Not Found|Function Not Found|No Data|Deprecated|Requested functionality has been deprecated|"
    r"Insufficient Permissions)"
)
FAILED = r"(?:ERR!|Unknown Error|GPU is lost|GPU requires reset)"
UNKNOWN = re.compile(rf"\[.*\]|{NOT_TOLD}|{FAILED}|", re.IGNORECASE)
BROKEN = re.compile(rf"\[(?!{NOT_TOLD}\])|{FAILED}", re.IGNORECASE)  # how such a value begins
MISMATCH = re.compile("Driver/library version mismatch")  # the driver was upgraded, and the old one is still loaded
WARNING = re.compile(r"\s*WARNING: .*", re.IGNORECASE)  # a line about a GPU that works, such as of its infoROM
INDEX, MASK = re.compile(r"\d{1,4}", re.ASCII), re.compile(r"0x[0-9a-fA-F]+")
MOST_TEXT, MOST_GPUS = 256 << 10, 64  # characters of an answer, and GPUs in it, that are believed
MOST_MIB, MOST_W, MOST_C, MOST_MHZ = 1 << 24, 10_000, 200, 10_000  # of one GPU: more cannot be true
PEAK = 2.0  # times its limit that a GPU may draw for a moment
PENDING = ("retired_pages.pending", "remapped_rows.pending")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # in newer and in older drivers
SLOWED = {  # bits of clocks_event_reasons.active (nvml.h) that mean something is wrong
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
THERMAL = (SLOWED[0x20], SLOWED[0x40])
XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d{1,4})\b,? ?(.*)", re.ASCII)
ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\b", re.IGNORECASE)
XIDS = {  # from NVIDIA's list of Xid errors: those that end a training run
    13: "a kernel went out of bounds",
    31: "a memory page fault",
    48: "a double-bit ECC error",
    63: "a memory page was retired or a row remapped",
    64: "a memory page could not be retired",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "a contained ECC error",
    95: "an uncontained ECC error",
    119: "the GSP firmware does not answer",
    120: "a GSP error",
}
FATAL_XIDS = (48, 64, 74, 79, 95, 119, 120)

BF16_TFLOPS = {  # dense, from NVIDIA's data sheets; the first name contained in the GPU's name counts
    2500: ("GB200",),
    2250: ("B200",),
    835: ("H200 NVL", "H100 NVL"),
    756: ("H100 PCIe",),
    989: ("GH200", "H200", "H100", "H800"),
    148: ("H20",),
    312: ("A100", "A800"),
    362: ("L40S",),
}


@dataclasses.dataclass(frozen=True, slots=True)
class GpuReport:
    """One GPU; None for what nvidia-smi does not report."""

    index: int
    name: str
    memory_mib: int | None
    used_mib: int | None
    driver: str
    ecc_errors: int | None = None
    pages_pending: bool | None = None  # pages to retire or rows to remap: needs a reset
    power_limit_w: float | None = None
    power_max_w: float | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    temperature_c: int | None = None
    slowed: tuple[str, ...] = ()
    uuid: str = ""
    bus: str = ""  # PCI address
    utilization: int | None = None  # percent of the last sample period in which a kernel ran
    power_w: float | None = None
    clock_mhz: int | None = None  # of the SMs
    fault: str = ""  # it answers, but not like a working GPU

    @property
    def is_capped(self) -> bool:
        """Whether its power limit is clearly below the maximum."""
        return (self.power_limit_w or math.inf) < 0.95 * (self.power_max_w or 0.0)

    @property
    def is_narrow(self) -> bool:
        """Whether it uses fewer PCIe lanes than it could."""
        return (self.pcie_width or math.inf) < (self.pcie_width_max or 0)


@dataclasses.dataclass(frozen=True, slots=True)
class SmiAnswer:
    """Raw output of nvidia-smi and related programs on a host; None: there is no such program."""

    # one line per GPU, values in the order of ``fields``
    smi: str | None = dataclasses.field(default=None, metadata=LINES)
    fields: tuple[str, ...] = ()
    apps: str | None = dataclasses.field(default=None, metadata=LINES)  # processes that hold GPU memory
    nvlink: str | None = dataclasses.field(default=None, metadata=LINES)
    xid: tuple[str, ...] = ()  # lines of the kernel log
    dmesg_readable: bool = True
    fabric_manager: str = ""  # from systemctl: active, inactive, failed


def read_smi(text: str | None, fields: Sequence[str]) -> tuple[list[GpuReport], str]:
    """Return the GPUs in nvidia-smi's answer, and what is wrong with the answer as a whole ('' if nothing)."""
    if text is None:
        return [], ""
    if text == "TIMEOUT":
        return [], "nvidia-smi does not answer: a GPU or the driver hangs"
    if len(text) > MOST_TEXT:
        return [], f"nvidia-smi printed {len(text) >> 10} KiB; only {MOST_TEXT >> 10} KiB are read"
    found, other = {}, []
    for line in text.splitlines():
        gpu = _gpu(line, fields)
        if gpu:
            found[gpu.uuid or gpu.index] = gpu
        elif line.strip() and not WARNING.match(line):
            other.append(line.strip())
    if len(found) > MOST_GPUS:
        return [], f"nvidia-smi lists {len(found)} GPUs; a machine has at most {MOST_GPUS}"
    nothing = "" if found else "nvidia-smi lists no GPU"
    return list(found.values()), "; ".join(other[:2]) or nothing


def warnings(text: str | None) -> list[str]:
    """Return the first warnings in nvidia-smi's answer; they are no fault."""
    return [line.strip() for line in (text or "")[:MOST_TEXT].splitlines() if WARNING.match(line)][:2]


def _gpu(line: str, fields: Sequence[str]) -> GpuReport | None:
    told = [value.strip() for value in line.split(",")]
    if (more := len(told) - len(fields)) > 0 and "name" in fields:  # commas in its name
        at = fields.index("name")
        told[at : at + more + 1] = [", ".join(told[at : at + more + 1])]
    if len(told) != len(fields):
        return None
    values = dict(zip(fields, told, strict=True))
    if not INDEX.fullmatch(values.get("index", "")):
        return None
    memory_mib, limit_w = _int(values.get("memory.total"), MOST_MIB), _float(values.get("power.limit"), MOST_W)
    return GpuReport(
        index=int(values["index"]),
        name=_known(values.get("name", "")),
        memory_mib=memory_mib,
        used_mib=_int(values.get("memory.used"), memory_mib or MOST_MIB),
        driver=_known(values.get("driver_version", "")),
        ecc_errors=_int(values.get("ecc.errors.uncorrected.volatile.total")),
        pages_pending=_pages_pending(values),
        power_limit_w=limit_w,
        power_max_w=_float(values.get("power.max_limit"), MOST_W),
        pcie_width=_int(values.get("pcie.link.width.current")),
        pcie_width_max=_int(values.get("pcie.link.width.max")),
        temperature_c=_int(values.get("temperature.gpu"), MOST_C),
        slowed=_slowed(values),
        uuid=_known(values.get("uuid", "")),
        bus=_known(values.get("pci.bus_id", "")),
        utilization=_int(values.get("utilization.gpu"), 100),
        power_w=_float(values.get("power.draw"), PEAK * (limit_w or MOST_W)),
        clock_mhz=_int(values.get("clocks.sm"), MOST_MHZ),
        fault=_fault(values) if BROKEN.search(line) else "",
    )


def _fault(values: Mapping[str, str]) -> str:
    broken = {name: value.strip("[]") for name, value in values.items() if BROKEN.match(value)}
    unread = f"{next(iter(broken), '')}{and_more(broken)} cannot be read"
    return given(f"{{}} ({unread})", ", ".join(dict.fromkeys(broken.values())))


def _pages_pending(values: Mapping[str, str]) -> bool | None:
    pending = [known for name in PENDING if (known := _known(values.get(name, "")))]
    return any(value.lower() not in ("no", "0") for value in pending) if pending else None


def _slowed(values: Mapping[str, str]) -> tuple[str, ...]:
    said = next((values[name] for name in REASONS if name in values), "")
    if not MASK.fullmatch(said):
        return ()
    mask = int(said, 16)
    return tuple(name for bit, name in SLOWED.items() if mask & bit)


def bf16_flops(name: str) -> float | None:
    """Return a GPU's peak dense BF16 operations per second; None if we do not have its data sheet."""
    return next((1e12 * tera for tera, names in BF16_TFLOPS.items() if any(known in name for known in names)), None)


def xids(lines: Sequence[str]) -> list[tuple[str, int, str]]:
    """Return the Xid errors in the kernel log: PCI address, number, meaning."""
    matches = [match for line in lines if (match := XID.search(line))]
    return [(match[1], int(match[2]), XIDS.get(int(match[2]), "see NVIDIA's list of Xid errors")) for match in matches]


def address_of(text: str) -> tuple[int, int, int] | None:
    """Return domain, bus and device of a PCI address, however it is written; None if there is none.

    The kernel log has ``PCI:0000:1b:00``, in MIG mode with the instance after it; nvidia-smi has ``00000000:1B:00.0``.
    """
    if match := ADDRESS.search(text):
        return int(match[1], 16), int(match[2], 16), int(match[3], 16)
    return None


def foreign(apps: str | None) -> list[tuple[int, str]]:
    """Return the processes that hold GPU memory: pid and name."""
    rows = [[part.strip() for part in line.split(",", 2)] for line in (apps or "").splitlines()]
    return [(int(row[0]), row[-1]) for row in rows if len(row) >= 3 and re.fullmatch(r"\d{1,9}", row[0], re.ASCII)]


def nvlinks_down(text: str | None) -> list[str]:
    """Return ``GPU 3: link 5`` for every inactive NVLink."""
    found, gpu = [], ""
    for line in (text or "").splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = match[1]
        elif match := re.match(r"\s*Link (\d+): .*inactive", line, re.IGNORECASE):
            found.append(f"GPU {gpu}: link {match[1]}")
    return found


def _known(text: str) -> str:
    return "" if UNKNOWN.fullmatch(text) else text


def _int(text: str | None, most: float = math.inf) -> int | None:
    number = _float(text, most)
    return None if number is None else int(number)


def _float(text: str | None, most: float = math.inf) -> float | None:
    """Return a number from 0 to ``most``; None if it cannot be true."""
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and 0 <= number <= most else None
