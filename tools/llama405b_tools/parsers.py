"""Parsers of output of a machine's programs (nvidia-smi, ip, torchrun, py-spy, ps, /proc), and NCCL's settings. Pure; unknown is None.

By default NCCL uses every active device, even a slow management port, and on RoCE the first address type, which may not be routable;
if nothing works, it silently falls back to TCP sockets.
"""

import calendar
import dataclasses
import datetime
import ipaddress
import json
import math
import re
from collections.abc import Mapping, Sequence

from llama405b.contract.errors import and_more, given
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
MIG_ON = (
    "MIG is on, so a rank would get only a slice of the GPU",
    "switch it off: nvidia-smi -i <its index> -mig 0, then reset it",
)
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
    """One GPU; None for values that nvidia-smi does not report."""

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
    mig: bool = False  # it is divided; a process sees one part of it
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
    """Raw output of nvidia-smi and related programs on a host; None: not installed."""

    # one line per GPU, values in the order of ``fields``
    smi: str | None = dataclasses.field(default=None, metadata=LINES)
    fields: tuple[str, ...] = ()
    apps: str | None = dataclasses.field(default=None, metadata=LINES)  # processes that hold GPU memory
    nvlink: str | None = dataclasses.field(default=None, metadata=LINES)
    xid: tuple[str, ...] = ()  # lines of the kernel log
    dmesg_readable: bool = True
    fabric_manager: str = ""  # from systemctl: active, inactive, failed


def read_smi(text: str | None, fields: Sequence[str]) -> tuple[list[GpuReport], str]:
    """Return the GPUs in nvidia-smi's output, and what is wrong with the output as a whole ('' if fine)."""
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
    """Return the first warnings in nvidia-smi's output; they are not faults."""
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
        mig=values.get("mig.mode.current") == "Enabled",
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
    """Return a GPU's peak dense BF16 operations per second; None if its data sheet is not in the table."""
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


NCCL_DEBUG_LINES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
SOCKETS = "NET/Socket"


@dataclasses.dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device, as sysfs writes it."""

    device: str
    port: int
    state: str
    rate: str
    link_layer: str
    gids: tuple[tuple[int, str, str, str], ...]  # index, type, GID, network device
    netdevs: tuple[str, ...]

    @property
    def up(self) -> bool:
        """Whether the port is active."""
        return "ACTIVE" in self.state.upper()

    @property
    def gbit(self) -> float:
        """The rate in Gbit/s; 0 if unknown."""
        rate = re.match(r"([\d.]+)", self.rate)
        return float(rate[1]) if rate else 0.0

    @property
    def roce(self) -> bool:
        """Whether the link is Ethernet."""
        return self.link_layer == "Ethernet"

    @property
    def efa(self) -> bool:
        """Whether the device is an AWS EFA."""
        return self.device.startswith(("efa", "rdmap"))

    @property
    def gid_index(self) -> int | None:
        """The index of the RoCE v2 GID with an IPv4 address."""
        return next((index for index, kind, gid, _ in self.gids if kind == "RoCE v2" and ":ffff:" in gid), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Rdma:
    """The RDMA devices of a host."""

    ports: tuple[RdmaPort, ...] = ()
    peermem: bool = False


def training_ports(ports: Sequence[RdmaPort]) -> list[RdmaPort]:
    """Return the ports to train over: the fastest that are up; InfiniBand before RoCE."""
    up = [port for port in ports if port.up and not port.efa]
    kind = [port for port in up if not port.roce] or up
    fastest = max((port.gbit for port in kind), default=0.0)
    return [port for port in kind if port.gbit == fastest]


def nccl_env(ports: Sequence[RdmaPort], interface: str) -> dict[str, tuple[str, str]]:
    """Return NCCL's settings for one host, each with its reason; ``interface``: the one on the route to the head."""
    env = {"NCCL_SOCKET_IFNAME": (interface, "on the route to the first host")}
    if any(port.efa for port in ports):
        env["FI_PROVIDER"] = ("efa", "the host has EFA devices; NCCL needs the aws-ofi-nccl plugin for them")
    use = training_ports(ports)
    if use:
        env["NCCL_IB_HCA"] = ("=" + ",".join(f"{port.device}:{port.port}" for port in use), _why(use, ports))
    indices = {port.gid_index for port in use if port.roce}
    if len(indices) == 1 and None not in indices:
        env["NCCL_IB_GID_INDEX"] = (str(indices.pop()), "RoCE v2 with an IPv4 address, the same on all ports")
    return env


def _why(use: Sequence[RdmaPort], ports: Sequence[RdmaPort]) -> str:
    kind = "RoCE" if use[0].roce else "InfiniBand"
    slower = sorted({port.device for port in ports if port.up and port not in use})
    return f"{len(use)} {kind} ports of {use[0].gbit:g} Gb/s are up{given('; slower: {}', ', '.join(slower))}"


def has_rdma(ports: Sequence[RdmaPort]) -> bool:
    """Return whether falling back to TCP sockets would lose performance."""
    return any(port.up for port in ports)


def socket_line(text: str) -> str:
    """Return the line in which NCCL reports that it uses TCP sockets; '' if there is none."""
    return next((line for line in text.splitlines() if SOCKETS in line and "NCCL INFO" in line and "Using" in line), "")


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """One of a host's own IPv4 addresses."""

    interface: str
    address: str
    mbit: str  # as the kernel writes it; -1 or "" if unknown


def is_private(address: str) -> bool:
    """Return whether an address is not publicly routable.

    A name counts as private, because somebody chose it.
    """
    try:
        return not ipaddress.ip_address(address).is_global
    except ValueError:
        return True


FAILED_RANK = re.compile(r"^  rank\s*: \d+ \(local_rank: (\d+)\)\n  exitcode\s*: (-?\d+)", re.MULTILINE)
SIGNALED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
STARTED = "%a %b %d %H:%M:%S %Y"  # 24 characters, in local time
NO_DIRECTORY = re.compile(r"\bcd: ")
NO_MODULE = re.compile(r"No module named '?(\w+)")


def failed_ranks(text: str) -> dict[int, int]:
    """Return the local ranks that torchrun saw fail on its host, each with its exit code (negative: signal).

    The first is its "first observed failure": the lowest of those that it saw within a second.
    """
    return {int(local_rank): int(exit_code) for local_rank, exit_code in reversed(FAILED_RANK.findall(text))}


def load_per_core(text: str) -> float:
    """Return how many processes want each core, from ``/proc/loadavg`` and the core count; 1 if unknown."""
    try:
        first, *_, cores = text.split()
        return float(first) / int(cores)
    except (ValueError, ZeroDivisionError):
        return 1.0


def ended_by(text: str) -> int | None:
    """Return the signal that ended torchrun, and that it passed on to its ranks; None if there was none."""
    match = SIGNALED.search(text)
    return int(match[1]) if match else None


def began_at(text: str) -> int | None:
    """Return when the process started, in seconds by its clock; None if it is gone or a zombie."""
    state, _, started = text.strip().partition(" ")
    if not state or state.startswith("Z"):
        return None
    try:
        return calendar.timegm(datetime.datetime.strptime(started.strip(), STARTED).timetuple())
    except ValueError:
        return None


THREAD = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[([^\]]*)\])? \(most recent call first\):")
FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
OUTERMOST = ("<module>", "_run_module_as_main", "_run_code")


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One call of a stack."""

    file: str  # of native code: the library
    line: int  # 0: unknown
    function: str
    code: str = ""  # the text of that line, if it could be read

    @property
    def is_python(self) -> bool:
        """Whether it is a call in Python code."""
        return self.file.endswith(".py") or self.file.startswith("<")


@dataclasses.dataclass(frozen=True, slots=True)
class Thread:
    """One thread's calls, innermost first."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    has_gil: bool = False

    @property
    def python(self) -> tuple[Frame, ...]:
        """Its calls in Python, innermost first."""
        return tuple(frame for frame in self.frames if frame.is_python)


def read_faulthandler(text: str) -> tuple[Thread, ...]:
    """Parse the last dump of faulthandler, main thread first; other lines are ignored."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if match := THREAD.fullmatch(line):
            threads.append((match[3] or match[2], []))
        elif threads and (match := FRAME.fullmatch(line)):
            threads[-1][1].append(Frame(match[1], int(match[2]) if match[2].isdigit() else 0, match[3]))
    mains = [name for name, frames in threads if frames and frames[-1].function in OUTERMOST]
    main = ["", *(name for name, _ in threads), *mains][-1]  # faulthandler writes the oldest thread last
    found = [Thread(name, tuple(frames), is_main=name == main) for name, frames in threads]
    return tuple(sorted(found, key=lambda thread: not thread.is_main))


def read_py_spy(text: str) -> tuple[Thread, ...]:
    """Parse ``py-spy dump --json``, main thread first; () if it is something else."""
    try:
        listed = json.loads(text)
        found = [
            Thread(
                each["thread_name"] or f"thread {each['os_thread_id']}",
                tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in each["frames"]),
                is_main=each["os_thread_id"] == each["pid"],
                has_gil=each["owns_gil"],
            )
            for each in listed
        ]
    except (ValueError, KeyError, TypeError):
        return ()
    return tuple(sorted(found, key=lambda thread: not thread.is_main))


X86_64 = {
    0: "read", 1: "write", 2: "open", 3: "close", 7: "poll", 8: "lseek", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv",
    20: "writev", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg",
    47: "recvmsg", 61: "wait4", 73: "flock", 74: "fsync", 75: "fdatasync", 82: "rename", 87: "unlink", 202: "futex",
    230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll",
    281: "epoll_pwait", 306: "syncfs", 332: "statx",
}  # fmt: skip
AARCH64 = {
    22: "epoll_pwait", 29: "ioctl", 32: "flock", 35: "unlink", 56: "openat", 57: "close", 62: "lseek", 63: "read", 64: "write",
    65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 82: "fsync",
    83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect",
    206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 260: "wait4", 267: "syncfs", 276: "rename", 291: "statx",
}  # fmt: skip
TABLES: Mapping[str, Mapping[int, str]] = {"x86_64": X86_64, "aarch64": AARCH64}
OF_A_FILE = frozenset(
    (
        "read",
        "write",
        "pread64",
        "pwrite64",
        "readv",
        "writev",
        "fsync",
        "fdatasync",
        "flock",
        "ioctl",
        "lseek",
        "syncfs",
        "sendto",
        "recvfrom",
        "sendmsg",
        "recvmsg",
        "connect",
        "accept",
    )
)  # fmt: skip - the first argument is a file's number


def syscall_of(text: str, machine: str) -> tuple[str, int | None]:
    """Return the name of the call in ``/proc/PID/syscall`` and its file number, if it has one.

    ("", None) if the process runs, or the file is empty.
    """
    words = text.split()
    if not words or not words[0].isdigit():
        return "", None
    number = int(words[0])
    name = TABLES.get(machine, {}).get(number, f"system call {number}")
    return name, int(words[1], 16) if name in OF_A_FILE and len(words) > 1 else None
