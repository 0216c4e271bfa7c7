"""The program that cluster-top runs on a host: prints a frame of facts every few seconds, as a line of JSON. Leaves nothing behind.

On a host without our environment it is sent over SSH and run by whatever python3 the host has (3.6 or newer), so it installs
nothing, and imports nothing of ours; elsewhere ``agent.watching`` adds the run that is followed. It ends when its standard input
closes, or when it has received nothing for a minute.

Counters and nvidia-smi's text are sent unparsed: the operator's terminal interprets them. nvidia-smi runs in a thread of its own,
so that a driver that hangs delays no frame.
"""

import collections
import errno
import functools
import glob
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

from llama405b_tools.agent.facts import (
    MARKER,
    disk_space,
    environment,
    machine_name,
    memory,
    pids,
    rdma_ports,
    read_text,
)

REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active", "")  # newest name first; "": do not ask
FIELDS = (
    "index,uuid,name,pci.bus_id,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw,power.limit,clocks.sm,"
    "ecc.errors.uncorrected.volatile.total,driver_version"
)
SMI_WAIT_S = 1.0  # how long a frame waits for nvidia-smi
MAX_STUCK = 3  # processes that hang in the driver and cannot be killed
MAX_SMI_BYTES = 256 << 10  # of one answer; eight GPUs take 1 KiB
MAX_PROCESSES = 1000
MAX_KERNEL_LINES = 200
FIRST_KERNEL_RECORDS, MAX_KERNEL_RECORDS = 1 << 17, 1000  # of any kind that are read at once: a whole log at first
MAX_PARENTS = 100  # between a process and the run's that started it
MAX_COMMAND_CHARS = 200  # characters
USER_WAIT_S = 1.0  # for the name of one user
SLOW_INTERVAL_S = 10.0  # for processes and whatever else costs more


class SmiQuery:
    """One query of nvidia-smi, in a thread of its own."""

    def __init__(self, reasons, with_apps):
        self.reasons, self.with_apps = reasons, with_apps
        self.reply = self.apps = self.child = None
        self.is_killed, self.took_s = False, 0.0
        self.started_at, self.done = time.monotonic(), threading.Event()
        threading.Thread(target=self._query, daemon=True).start()

    def kill(self):
        """Kill nvidia-smi and its children, as far as the driver releases them."""
        self.is_killed = True
        if self.child is not None and not self.done.is_set():
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
            except OSError:
                pass

    def _query(self):
        try:
            while True:
                fields = ",".join(filter(None, [FIELDS, self.reasons[0]]))
                text = self._run(["--query-gpu=" + fields, "--format=csv,noheader,nounits"])
                if "not a valid field" not in text or len(self.reasons) == 1:
                    break
                self.reasons.pop(0)
            if self.with_apps and not self.is_killed:
                self.apps = self._run(
                    ["--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
                )
            self.reply = {"text": text, "fields": fields.split(",")}
        except OSError as error:
            self.reply = {"text": "nvidia-smi: %s" % error.strerror, "fields": []}
        finally:
            self.took_s = time.monotonic() - self.started_at
            self.done.set()

    def _run(self, args):
        with subprocess.Popen(
            ["nvidia-smi"] + args,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as self.child:
            if self.is_killed:  # meanwhile
                self.kill()
            text = self.child.stdout.read(MAX_SMI_BYTES + 1)
            if len(text) > MAX_SMI_BYTES:
                self.kill()
                raise OSError(errno.EFBIG, "printed more than %d KiB" % (MAX_SMI_BYTES >> 10))
        return text.decode("utf-8", "replace")


class Smi:
    """nvidia-smi, queried repeatedly."""

    def __init__(self, retry_s):
        self.retry_s = retry_s  # until one that does not answer is replaced
        self.reasons = list(REASONS)
        self.query, self.stuck_queries = None, []  # under way; killed, but not gone
        self.reply, self.apps = None, None
        self.replied_at = self.took_s = 0.0
        self.silent_since = None  # when the first query without an answer began

    def start_query(self, with_apps):
        """Start a query, unless one is running. Replace a hung one, unless too many are stuck in the driver."""
        self.stuck_queries = [query for query in self.stuck_queries if not query.done.is_set()]
        if self.query and time.monotonic() > self.query.started_at + self.retry_s:
            self.query.kill()
            self.stuck_queries.append(self.query)
            self.query = None
        if self.query is None and len(self.stuck_queries) < MAX_STUCK:
            if shutil.which("nvidia-smi"):
                self.query = SmiQuery(self.reasons, with_apps)
                self.silent_since = self.silent_since or self.query.started_at
            else:
                self.silent_since = None

    def state(self):
        """Return the newest reply, its age, and how long queries have been unanswered."""
        if self.query and self.query.done.wait(SMI_WAIT_S):
            self.reply = self.query.reply
            if self.query.apps is not None:  # "": no process is on a GPU any more
                self.apps = self.query.apps
            self.replied_at, self.took_s = time.monotonic(), self.query.took_s
            self.query = self.silent_since = None
        now = time.monotonic()
        hung_s = round(now - (self.silent_since or now), 1)
        if self.reply is None:
            return {"text": None, "hung_s": hung_s}
        age_s, took_s = round(now - self.replied_at, 1), round(self.took_s, 3)
        return dict(self.reply, apps=self.apps, age_s=age_s, took_s=took_s, hung_s=hung_s)

    def end(self):
        """Kill the running query, as far as the driver releases it."""
        if self.query:
            self.query.kill()


class KernelLog:
    """Lines of the kernel's log about GPUs and memory since boot, if this user may read it."""

    WORDS = re.compile(rb"NVRM: Xid|Out of memory: Killed process|oom-kill")
    RECORD = re.compile(rb"\d+,\d+,(\d+),[^;]*;(.*)")  # priority, number, microseconds, flags; text

    def __init__(self, path="/dev/kmsg"):
        try:
            self.file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            self.file = None
        self.max_records = FIRST_KERNEL_RECORDS
        self.read_at = 0.0  # all that was logged until then has been read

    def read_new(self):
        """Return the lines since the last call, at first since boot; None if this user may not read them.

        If there are many, only the newest are returned. Each line comes with its time in seconds since the epoch, by the host's
        clock.
        """
        if self.file is None:
            return None
        records, now = collections.deque(maxlen=MAX_KERNEL_LINES), time.time()
        for record in self._records():
            if self.WORDS.search(record):
                records.append(record)
        lines = [self._parse_record(match, now) for match in map(self.RECORD.match, records) if match]
        self.max_records, self.read_at = MAX_KERNEL_RECORDS, now
        return lines

    def _records(self):
        for _ in range(self.max_records):
            try:
                # /dev/kmsg returns one record per read.
                record = os.read(self.file, 8192)
            except BrokenPipeError:  # overwritten before it was read
                continue
            except OSError:  # BlockingIOError: there are no more
                return
            if not record:
                return
            yield record

    def _parse_record(self, match, now):
        """Return the time and the text of a record.

        The kernel stamps records with its scheduler's clock, which like CLOCK_MONOTONIC starts at boot and stops while the machine
        sleeps. No clock corrects it, so it may drift from CLOCK_MONOTONIC by seconds in weeks. That does not matter for earlier
        lines, which belong to an attempt of hours or to none; newer lines arrived since the last call.
        """
        logged_at = now - time.monotonic() + int(match.group(1)) / 1e6
        text = match.group(2).decode("utf-8", "replace").strip()
        return min(max(logged_at, self.read_at), now), text[:300]


def count_pci_gpus():
    """Return how many NVIDIA GPUs the kernel sees."""
    nvidia_paths = [
        path for path in glob.glob("/sys/bus/pci/devices/*") if read_text(path + "/vendor").strip() == "0x10de"
    ]
    return sum(read_text(path + "/class").startswith("0x03") for path in nvidia_paths)


def sample_cpu():
    """Return CPU ticks since boot, total and idle."""
    ticks = [int(word) for word in read_text("/proc/stat").partition("\n")[0].split()[1:9]]
    return {
        "total": sum(ticks),
        "idle": sum(ticks[3:5]),
        "cores": os.cpu_count(),
        "load": read_text("/proc/loadavg").split()[:1],
    }


def sample_memory():
    """Return bytes of memory, and how many processes were killed for lack of it."""
    total, available = memory()
    kills = re.findall(r"^oom_kill (\d+)", read_text("/proc/vmstat"), re.M)
    return {
        "total": total,
        "available": available,
        "oom_kills": next(map(int, kills), None),
    }


def sample_disks(paths):
    """Return free and total bytes of the filesystems the run writes to."""
    return [[path, *space] for path, space in ((path, disk_space(path)) for path in paths) if space]


def sample_network():
    """Return bytes received and sent by each interface, except loopback, bridges and containers."""
    counters = {}
    for line in read_text("/proc/net/dev").splitlines()[2:]:
        name, _, rest = line.partition(":")
        words, name = rest.split(), name.strip()
        if name != "lo" and not name.startswith(("veth", "docker", "br-", "virbr")):
            counters[name] = [int(words[0]), int(words[8])]
    return counters


def sample_infiniband():
    """Return each port's rate, state, bytes and error counters."""
    ports = []
    for path, port in rdma_ports():
        counters = {}
        for folder, names in (
            ("counters", ("port_rcv_data", "port_xmit_data", "symbol_error", "link_downed", "port_rcv_errors")),
            ("hw_counters", ("out_of_sequence", "packet_seq_err", "roce_adp_retrans")),
        ):
            for name in names:
                text = read_text("%s/%s/%s" % (path, folder, name)).strip()
                if text.isdigit():
                    counters[name] = int(text)
        ports.append(dict(port, counters=counters))
    return ports


def sample_processes(marker):
    """Return the run's processes on this host: pid, state, CPU ticks, resident bytes, local rank, command."""
    rows = []
    for pid in pids():
        if len(rows) == MAX_PROCESSES:
            break
        variables = environment(pid)
        if MARKER.encode() + b"=" + marker not in variables:
            continue
        try:
            command = read_command(pid)
        except OSError:
            continue
        words = read_text("/proc/%d/stat" % pid).rpartition(") ")[2].split()
        if len(words) > 21:
            ranks = [item[5:].decode() for item in variables if item.startswith(b"RANK=")]
            ticks, pages = int(words[11]) + int(words[12]), int(words[21])
            rows.append([pid, words[0], ticks, pages * os.sysconf("SC_PAGE_SIZE"), "".join(ranks[:1]), command])
    return rows


def read_command(pid):
    """Return the beginning of a process's command line."""
    with open("/proc/%s/cmdline" % pid, "rb") as file:
        words = file.read().rstrip(b"\0").split(b"\0")
    if len(words) > 4 and words[2] == b"-c" and b"run_module" in words[3]:  # ours, see contract/software.py
        words[1:4] = [b"-m"]
    return b" ".join(words).decode("utf-8", "replace").strip()[:MAX_COMMAND_CHARS]


def sample_io(pids):
    """Return the bytes that each process has read and written so far, if the kernel reports them.

    ``rchar`` and ``wchar`` count bytes requested by read and write, from any source. ``read_bytes`` counts bytes fetched from a disk,
    the only counter of memory-mapped files such as weights. Bytes in both count twice: the sum only shows whether the process
    moves data. It does not count send and recv on sockets.
    """
    totals = []
    for pid in pids:
        counts = re.findall(r"^(?:rchar|wchar|read_bytes): (\d+)$", read_text("/proc/%d/io" % pid), re.M)
        if counts:
            totals.append([pid, sum(map(int, counts))])
    return totals


def foreign_processes(apps, run_pids):
    """Return processes on GPUs that are not of the run: pid, user, command; None before the first list.

    nvidia-smi lists them.

    ``run_pids``: pids of the run. A process that is unknown here (ended, or in another pid namespace) has no user and no command.
    """
    if apps is None:
        return None
    pids = {int(pid) for pid in re.findall(r"^\s*(\d{1,9})\s*,", apps, re.M)}
    return [
        [pid] + find_user_and_command(pid) for pid in sorted(pids)[:MAX_PROCESSES] if not is_descendant(pid, run_pids)
    ]


def find_user_and_command(pid):
    """Return the user and the command of a process; empty if it is not known here."""
    try:
        return [find_user_name(os.stat("/proc/%d" % pid).st_uid), read_command(pid)]
    except OSError:
        return ["", ""]


@functools.lru_cache(1000)
def find_user_name(uid):
    """Return a user's name, wherever this host looks names up; the number if the lookup is slow."""
    try:
        result = subprocess.run(
            ["getent", "passwd", str(uid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=USER_WAIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return str(uid)
    return result.stdout.partition(b":")[0].decode("utf-8", "replace") or str(uid)


def is_descendant(pid, run_pids):
    """Return whether a process is one of these, or a descendant of one of them."""
    for _ in range(MAX_PARENTS):
        if pid in run_pids or pid <= 1:
            return pid in run_pids
        words = read_text("/proc/%d/stat" % pid).rpartition(") ")[2].split()
        pid = int(words[1]) if len(words) > 1 else 0
    return False


class NoRun:
    """Stands for the run on a host where none is followed."""

    marker, disk_paths = "", ()

    def read_input(self, data):
        """Do nothing: there is no run to choose."""

    def frame(self, is_slow):
        """Return None, for no run."""

    def pids(self):
        """Return the processes that its files name."""
        return set()

    def list_names(self):
        """Return the names of other runs."""
        return []

    def dumps(self, frame):
        """Return a frame as a line of JSON."""
        return json.dumps(frame)


class Machine:
    """This machine, apart from its runs."""

    def __init__(self, smi):
        self.smi, self.kernel = smi, KernelLog()
        self.name = machine_name()
        self.pci_gpus = 0

    def begin(self, is_slow):
        """Start the queries that take a while."""
        self.smi.start_query(is_slow)
        if is_slow:
            self.pci_gpus = count_pci_gpus()

    def frame(self):
        """Return its part of a frame."""
        lines = self.kernel.read_new()
        return {
            "machine": self.name,
            "pci_gpus": self.pci_gpus,
            "cpu": sample_cpu(),
            "memory": sample_memory(),
            "net": sample_network(),
            "ib": sample_infiniband(),
            "kernel": lines and [text for _, text in lines],
            "kernel_times": [round(logged_at, 3) for logged_at, _ in lines or []],
            "smi": self.smi.state(),
        }

    def slow_frame(self, run):
        """Return the costlier part of a frame: the run's processes, their I/O, and others on the GPUs."""
        procs = sample_processes(run.marker.encode()) if run.marker else []
        run_pids = {process[0] for process in procs} | run.pids()
        return {
            "procs": procs,
            "io": sample_io(process[0] for process in procs if process[4]),
            "foreign": foreign_processes(self.smi.apps, run_pids),
        }

    def end(self):
        """Kill what still runs."""
        self.smi.end()


def main():
    """Sample this machine alone."""
    request = json.loads(sys.stdin.buffer.readline().decode())
    workdir = os.path.expanduser(request["workdir"])
    os.chdir(workdir if os.path.isdir(workdir) else "/")
    run_until_silent(dict(request, workdir=workdir), Machine(Smi(request["smi_retry_s"])), NoRun())


def run_until_silent(request, machine, run):
    """Write frames until nobody reads them, or until a signal."""

    def leave(*_):
        sys.exit()  # no OSError, which what is interrupted may take for its own

    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        write_frames(request, machine, run)
    except BrokenPipeError:
        pass
    finally:
        machine.end()


def read_pending_input():
    """Return input that was read from the pipe together with the request."""
    # So that peek() returns at once if nothing is buffered.
    os.set_blocking(0, False)
    try:
        return sys.stdin.buffer.peek()
    finally:
        os.set_blocking(0, True)


def write_frames(request, machine, run):
    """Write frames of the machine and the run until nothing has been received for a while."""
    run.read_input(read_pending_input())
    last_input, next_slow, next_tick = time.monotonic(), 0.0, time.monotonic()
    while time.monotonic() - last_input < request["deaf_s"]:
        is_slow = time.monotonic() >= next_slow
        machine.begin(is_slow)
        state = run.frame(is_slow)
        frame = {
            **machine.frame(),
            "cwd": request["workdir"],
            "slots": request.get("slots", 0),
            "disks": sample_disks(dict.fromkeys([os.getcwd()] + list(run.disk_paths))),
            "run": state,
            "runs": [] if state else run.list_names(),
            "own": [round(time.process_time(), 3), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss],
            "now": time.time(),
        }
        if is_slow:
            next_slow = time.monotonic() + SLOW_INTERVAL_S
            frame.update(machine.slow_frame(run))
        sys.stdout.write(run.dumps(frame) + "\n")
        sys.stdout.flush()
        next_tick = max(next_tick + request["interval_s"], time.monotonic())
        while select.select([sys.stdin], [], [], max(0.0, next_tick - time.monotonic()))[0]:
            data = os.read(0, 4096)
            if not data:
                return
            run.read_input(data)
            last_input = time.monotonic()


if __name__ == "__main__":
    main()
