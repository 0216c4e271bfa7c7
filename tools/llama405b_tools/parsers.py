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

from llama405b.contract.errors import and_more, fmt_if
from llama405b.contract.reader import LINES

UNREPORTED = (
    r"(?:N/A|Not Supported|Not Found|Function Not Found|No Data|Deprecated|Requested functionality has been deprecated|"
    r"Insufficient Permissions)"
)
FAILED = r"(?:ERR!|Unknown Error|GPU is lost|GPU requires reset)"
UNKNOWN = re.compile(rf"\[.*\]|{UNREPORTED}|{FAILED}|", re.IGNORECASE)
BROKEN = re.compile(rf"\[(?!{UNREPORTED}\])|{FAILED}", re.IGNORECASE)  # how such a value begins
MISMATCH = re.compile("Driver/library version mismatch")  # the driver was upgraded, and the old one is still loaded
WARNING = re.compile(r"\s*WARNING: .*", re.IGNORECASE)  # a line about a GPU that works, such as of its infoROM
MIG_ON = (
    "MIG is on, so a rank would get only a slice of the GPU",
    "switch it off: nvidia-smi -i <its index> -mig 0, then reset it",
)
INDEX, MASK = re.compile(r"\d{1,4}", re.ASCII), re.compile(r"0x[0-9a-fA-F]+")
MAX_TEXT_CHARS, MAX_GPUS = 256 << 10, 64  # characters of an answer, and GPUs in it, that are believed
MAX_MIB, MAX_W, MAX_C, MAX_MHZ = 1 << 24, 10_000, 200, 10_000  # of one GPU: more cannot be true
PEAK_POWER_FACTOR = 2.0  # times its limit that a GPU may draw for a moment
PENDING_FIELDS = ("retired_pages.pending", "remapped_rows.pending")
REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # in newer and in older drivers
SLOWDOWN_REASONS = {  # bits of clocks_event_reasons.active (nvml.h) that mean something is wrong
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
THERMAL_REASONS = (SLOWDOWN_REASONS[0x20], SLOWDOWN_REASONS[0x40])
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
    slowdowns: tuple[str, ...] = ()
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


def parse_smi(text: str | None, fields: Sequence[str]) -> tuple[list[GpuReport], str]:
    """Return the GPUs in nvidia-smi's output, and what is wrong with the output as a whole ('' if fine)."""
    if text is None:
        return [], ""
    if text == "TIMEOUT":
        return [], "nvidia-smi does not answer: a GPU or the driver hangs"
    if len(text) > MAX_TEXT_CHARS:
        return [], f"nvidia-smi printed {len(text) >> 10} KiB; only {MAX_TEXT_CHARS >> 10} KiB are read"
    gpus, other_lines = {}, []
    for line in text.splitlines():
        gpu = _parse_gpu(line, fields)
        if gpu:
            gpus[gpu.uuid or gpu.index] = gpu
        elif line.strip() and not WARNING.match(line):
            other_lines.append(line.strip())
    if len(gpus) > MAX_GPUS:
        return [], f"nvidia-smi lists {len(gpus)} GPUs; a machine has at most {MAX_GPUS}"
    no_gpu = "" if gpus else "nvidia-smi lists no GPU"
    return list(gpus.values()), "; ".join(other_lines[:2]) or no_gpu


def smi_warnings(text: str | None) -> list[str]:
    """Return the first warnings in nvidia-smi's output; they are not faults."""
    return [line.strip() for line in (text or "")[:MAX_TEXT_CHARS].splitlines() if WARNING.match(line)][:2]


def _parse_gpu(line: str, fields: Sequence[str]) -> GpuReport | None:
    cells = [value.strip() for value in line.split(",")]
    if (n_extra := len(cells) - len(fields)) > 0 and "name" in fields:  # commas in its name
        name_index = fields.index("name")
        cells[name_index : name_index + n_extra + 1] = [", ".join(cells[name_index : name_index + n_extra + 1])]
    if len(cells) != len(fields):
        return None
    values = dict(zip(fields, cells, strict=True))
    if not INDEX.fullmatch(values.get("index", "")):
        return None
    memory_mib, limit_w = _int(values.get("memory.total"), MAX_MIB), _float(values.get("power.limit"), MAX_W)
    return GpuReport(
        index=int(values["index"]),
        name=_known_text(values.get("name", "")),
        memory_mib=memory_mib,
        used_mib=_int(values.get("memory.used"), memory_mib or MAX_MIB),
        driver=_known_text(values.get("driver_version", "")),
        ecc_errors=_int(values.get("ecc.errors.uncorrected.volatile.total")),
        pages_pending=_pages_pending(values),
        power_limit_w=limit_w,
        power_max_w=_float(values.get("power.max_limit"), MAX_W),
        pcie_width=_int(values.get("pcie.link.width.current")),
        pcie_width_max=_int(values.get("pcie.link.width.max")),
        temperature_c=_int(values.get("temperature.gpu"), MAX_C),
        slowdowns=_slowdowns(values),
        uuid=_known_text(values.get("uuid", "")),
        bus=_known_text(values.get("pci.bus_id", "")),
        utilization=_int(values.get("utilization.gpu"), 100),
        power_w=_float(values.get("power.draw"), PEAK_POWER_FACTOR * (limit_w or MAX_W)),
        clock_mhz=_int(values.get("clocks.sm"), MAX_MHZ),
        mig=values.get("mig.mode.current") == "Enabled",
        fault=_fault(values) if BROKEN.search(line) else "",
    )


def _fault(values: Mapping[str, str]) -> str:
    broken_values = {name: value.strip("[]") for name, value in values.items() if BROKEN.match(value)}
    clause = f"{next(iter(broken_values), '')}{and_more(broken_values)} cannot be read"
    return fmt_if(f"{{}} ({clause})", ", ".join(dict.fromkeys(broken_values.values())))


def _pages_pending(values: Mapping[str, str]) -> bool | None:
    pending_values = [text for name in PENDING_FIELDS if (text := _known_text(values.get(name, "")))]
    return any(value.lower() not in ("no", "0") for value in pending_values) if pending_values else None


def _slowdowns(values: Mapping[str, str]) -> tuple[str, ...]:
    mask_text = next((values[name] for name in REASON_FIELDS if name in values), "")
    if not MASK.fullmatch(mask_text):
        return ()
    mask = int(mask_text, 16)
    return tuple(name for bit, name in SLOWDOWN_REASONS.items() if mask & bit)


def bf16_flops(name: str) -> float | None:
    """Return a GPU's peak dense BF16 operations per second; None if its data sheet is not in the table."""
    return next((1e12 * tera for tera, names in BF16_TFLOPS.items() if any(model in name for model in names)), None)


def parse_xids(lines: Sequence[str]) -> list[tuple[str, int, str]]:
    """Return the Xid errors in the kernel log: PCI address, number, meaning."""
    matches = [match for line in lines if (match := XID.search(line))]
    return [(match[1], int(match[2]), XIDS.get(int(match[2]), "see NVIDIA's list of Xid errors")) for match in matches]


def parse_pci_address(text: str) -> tuple[int, int, int] | None:
    """Return domain, bus and device of a PCI address, however it is written; None if there is none.

    The kernel log has ``PCI:0000:1b:00``, in MIG mode with the instance after it; nvidia-smi has ``00000000:1B:00.0``.
    """
    if match := ADDRESS.search(text):
        return int(match[1], 16), int(match[2], 16), int(match[3], 16)
    return None


def parse_gpu_processes(apps: str | None) -> list[tuple[int, str]]:
    """Return the processes that hold GPU memory: pid and name."""
    rows = [[part.strip() for part in line.split(",", 2)] for line in (apps or "").splitlines()]
    return [(int(row[0]), row[-1]) for row in rows if len(row) >= 3 and re.fullmatch(r"\d{1,9}", row[0], re.ASCII)]


def nvlinks_down(text: str | None) -> list[str]:
    """Return ``GPU 3: link 5`` for every inactive NVLink."""
    links, gpu = [], ""
    for line in (text or "").splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = match[1]
        elif match := re.match(r"\s*Link (\d+): .*inactive", line, re.IGNORECASE):
            links.append(f"GPU {gpu}: link {match[1]}")
    return links


def _known_text(text: str) -> str:
    return "" if UNKNOWN.fullmatch(text) else text


def _int(text: str | None, max_value: float = math.inf) -> int | None:
    number = _float(text, max_value)
    return None if number is None else int(number)


def _float(text: str | None, max_value: float = math.inf) -> float | None:
    """Return a number from 0 to ``max_value``; None if it cannot be true."""
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and 0 <= number <= max_value else None


NCCL_DEBUG_LINES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
SOCKET_TRANSPORT = "NET/Socket"


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
    def is_up(self) -> bool:
        """Whether the port is active."""
        return "ACTIVE" in self.state.upper()

    @property
    def gbit(self) -> float:
        """The rate in Gbit/s; 0 if unknown."""
        rate = re.match(r"([\d.]+)", self.rate)
        return float(rate[1]) if rate else 0.0

    @property
    def is_roce(self) -> bool:
        """Whether the link is Ethernet."""
        return self.link_layer == "Ethernet"

    @property
    def is_efa(self) -> bool:
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
    active_ports = [port for port in ports if port.is_up and not port.is_efa]
    fabric_ports = [port for port in active_ports if not port.is_roce] or active_ports
    fastest = max((port.gbit for port in fabric_ports), default=0.0)
    return [port for port in fabric_ports if port.gbit == fastest]


def nccl_env(ports: Sequence[RdmaPort], interface: str) -> dict[str, tuple[str, str]]:
    """Return NCCL's settings for one host, each with its reason; ``interface``: the one on the route to the head."""
    env = {"NCCL_SOCKET_IFNAME": (interface, "on the route to the first host")}
    if any(port.is_efa for port in ports):
        env["FI_PROVIDER"] = ("efa", "the host has EFA devices; NCCL needs the aws-ofi-nccl plugin for them")
    training = training_ports(ports)
    if training:
        env["NCCL_IB_HCA"] = (
            "=" + ",".join(f"{port.device}:{port.port}" for port in training),
            _hca_reason(training, ports),
        )
    indices = {port.gid_index for port in training if port.is_roce}
    if len(indices) == 1 and None not in indices:
        env["NCCL_IB_GID_INDEX"] = (str(indices.pop()), "RoCE v2 with an IPv4 address, the same on all ports")
    return env


def _hca_reason(training: Sequence[RdmaPort], ports: Sequence[RdmaPort]) -> str:
    fabric = "RoCE" if training[0].is_roce else "InfiniBand"
    slower = sorted({port.device for port in ports if port.is_up and port not in training})
    return (
        f"{len(training)} {fabric} ports of {training[0].gbit:g} Gb/s are up{fmt_if('; slower: {}', ', '.join(slower))}"
    )


def has_rdma(ports: Sequence[RdmaPort]) -> bool:
    """Return whether falling back to TCP sockets would lose performance."""
    return any(port.is_up for port in ports)


def find_socket_line(text: str) -> str:
    """Return the line in which NCCL reports that it uses TCP sockets; '' if there is none."""
    return next(
        (line for line in text.splitlines() if SOCKET_TRANSPORT in line and "NCCL INFO" in line and "Using" in line), ""
    )


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
PS_TIME_FORMAT = "%a %b %d %H:%M:%S %Y"  # 24 characters, in local time
NO_DIRECTORY = re.compile(r"\bcd: ")
NO_MODULE = re.compile(r"No module named '?(\w+)")


def parse_failed_ranks(text: str) -> dict[int, int]:
    """Return the local ranks that torchrun saw fail on its host, each with its exit code (negative: signal).

    The first is its "first observed failure": the lowest of those that it saw within a second.
    """
    return {int(local_rank): int(exit_code) for local_rank, exit_code in reversed(FAILED_RANK.findall(text))}


def load_per_core(text: str) -> float:
    """Return how many processes want each core, from ``/proc/loadavg`` and the core count; 1 if unknown."""
    try:
        load, *_, cores = text.split()
        return float(load) / int(cores)
    except (ValueError, ZeroDivisionError):
        return 1.0


def parse_torchrun_signal(text: str) -> int | None:
    """Return the signal that ended torchrun, and that it passed on to its ranks; None if there was none."""
    match = SIGNALED.search(text)
    return int(match[1]) if match else None


def parse_ps_start(text: str) -> int | None:
    """Return when the process started, in seconds by its clock; None if it is gone or a zombie."""
    state, _, start_text = text.strip().partition(" ")
    if not state or state.startswith("Z"):
        return None
    try:
        return calendar.timegm(datetime.datetime.strptime(start_text.strip(), PS_TIME_FORMAT).timetuple())
    except ValueError:
        return None


THREAD = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[([^\]]*)\])? \(most recent call first\):")
FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
OUTERMOST_FUNCTIONS = ("<module>", "_run_module_as_main", "_run_code")


@dataclasses.dataclass(frozen=True, slots=True)
class StackFrame:
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
    frames: tuple[StackFrame, ...]
    is_main: bool = False
    has_gil: bool = False

    @property
    def python_frames(self) -> tuple[StackFrame, ...]:
        """Its calls in Python, innermost first."""
        return tuple(frame for frame in self.frames if frame.is_python)


def parse_faulthandler(text: str) -> tuple[Thread, ...]:
    """Parse the last dump of faulthandler, main thread first; other lines are ignored."""
    threads: list[tuple[str, list[StackFrame]]] = []
    for line in text.splitlines():
        if match := THREAD.fullmatch(line):
            threads.append((match[3] or match[2], []))
        elif threads and (match := FRAME.fullmatch(line)):
            threads[-1][1].append(StackFrame(match[1], int(match[2]) if match[2].isdigit() else 0, match[3]))
    mains = [name for name, frames in threads if frames and frames[-1].function in OUTERMOST_FUNCTIONS]
    main = ["", *(name for name, _ in threads), *mains][-1]  # faulthandler writes the oldest thread last
    parsed_threads = [Thread(name, tuple(frames), is_main=name == main) for name, frames in threads]
    return tuple(sorted(parsed_threads, key=lambda thread: not thread.is_main))


def parse_py_spy(text: str) -> tuple[Thread, ...]:
    """Parse ``py-spy dump --json``, main thread first; () if it is something else."""
    try:
        thread_dumps = json.loads(text)
        threads = [
            Thread(
                thread_dump["thread_name"] or f"thread {thread_dump['os_thread_id']}",
                tuple(StackFrame(frame["filename"], frame["line"], frame["name"]) for frame in thread_dump["frames"]),
                is_main=thread_dump["os_thread_id"] == thread_dump["pid"],
                has_gil=thread_dump["owns_gil"],
            )
            for thread_dump in thread_dumps
        ]
    except (ValueError, KeyError, TypeError):
        return ()
    return tuple(sorted(threads, key=lambda thread: not thread.is_main))


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
SYSCALL_TABLES: Mapping[str, Mapping[int, str]] = {"x86_64": X86_64, "aarch64": AARCH64}
FILE_SYSCALLS = frozenset(
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


def parse_syscall(text: str, machine: str) -> tuple[str, int | None]:
    """Return the name of the call in ``/proc/PID/syscall`` and its file number, if it has one.

    ("", None) if the process runs, or the file is empty.
    """
    words = text.split()
    if not words or not words[0].isdigit():
        return "", None
    number = int(words[0])
    name = SYSCALL_TABLES.get(machine, {}).get(number, f"system call {number}")
    return name, int(words[1], 16) if name in FILE_SYSCALLS and len(words) > 1 else None
