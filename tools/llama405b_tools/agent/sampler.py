"""What cluster-top runs on a host: a frame of facts every few seconds, as a line of JSON. Leaves nothing behind.

It is sent over SSH and run by whatever python3 the host has (3.6 or newer), so it is one file that imports nothing of ours
and installs nothing. It ends when its standard input closes, or when it has received nothing for a minute.

Counters and nvidia-smi's text are sent as they are: what they mean is decided at the operator's terminal. nvidia-smi runs
in a thread of its own, so that a driver that hangs delays no frame.
"""

import collections
import errno
import fcntl
import functools
import glob
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active", "")  # newest name first; "": do not ask
FIELDS = (
    "index,uuid,name,pci.bus_id,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw,power.limit,clocks.sm,"
    "ecc.errors.uncorrected.volatile.total,driver_version"
)
SMI_WAIT_S = 1.0  # how long a frame waits for nvidia-smi
MOST_STUCK = 3  # processes that hang in the driver and cannot be killed
MOST_SMI_BYTES = 256 << 10  # of one answer; eight GPUs take 1 KiB
MOST_FILE_BYTES = 2 << 20  # the kernel gives nothing of /proc/sys to who asks for more than 4 MiB
MOST_PROCESSES = 1000
MOST_KERNEL_LINES = 200
FIRST_KERNEL_RECORDS, MOST_KERNEL_RECORDS = 1 << 17, 1000  # of any kind that are read at once: a whole log at first
MOST_PARENTS = 100  # between a process and the run's that started it
MOST_COMMAND = 200  # characters
USER_WAIT_S = 1.0  # for the name of one user
MOST_SAVE_S = 1e9  # longer ones are not believed
SLOW_EVERY_S = 10.0  # for processes and whatever else costs more
FIRST_METRICS_BYTES = 256 << 10
LAST_EVENTS_BYTES = 64 << 10
SAVES = ("saved", "not saved")  # the kinds of events
LAST_INTERVALS = 5  # of which the longest is usual
LEAST_S = 10.0  # of a save, and between saves: those that are faster are not missed
AFTER_SAVES = ("after save", "after save failed")
NCCL_SEARCH_BYTES = 1 << 20
NETWORKS = (
    (b"NET/IB : Using [", "IB"),
    (b"NET/OFI Selected", "EFA"),
    (b"NET/Socket : Using [", "SOCKET"),
)  # NCCL's words
MARKER = b"LLAMA405B_NODE="
TRAINER = ["-m", "llama405b.train"]
UNSENT = ("command", "directory", "message", "cause")  # of what a guard says
STEP_DIR = re.compile(r"step-\d{8}$")


def read(path, default=""):
    """Return a small file's text."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MOST_FILE_BYTES)
    except (OSError, ValueError):
        return default


def read_object(path):
    """Return a JSON object from a file, or None."""
    return parse_object(read(path))


def parse_object(text):
    """Return a JSON object from a text, or None."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def has_died_here(guard):
    """Whether a guard ran on this machine, in this boot or an earlier one, and is gone."""
    ids = read("/etc/machine-id") + " " + read("/proc/sys/kernel/random/boot_id")
    machine, here = str(guard.get("machine")).split(), [socket.gethostname()] + ids.split()
    if not guard.get("pid") or (machine != here and (len(machine) != 3 or machine[:2] != here[:2])):
        return False
    fields = read("/proc/%s/stat" % guard["pid"]).rpartition(") ")[2].split()
    lives = len(fields) > 19 and fields[0] not in "ZX" and fields[19] == str(guard.get("pid_start"))
    return machine != here or not lives


class Query:
    """One query of nvidia-smi, in a thread of its own."""

    def __init__(self, reasons, with_apps):
        self.reasons, self.with_apps = reasons, with_apps
        self.answer = self.apps = self.child = None
        self.killed, self.took_s = False, 0.0
        self.began, self.done = time.monotonic(), threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def kill(self):
        """End it, with whatever it started, if the driver lets go of it."""
        self.killed = True
        if self.child is not None and not self.done.is_set():
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
            except OSError:
                pass

    def _ask(self):
        try:
            while True:
                fields = ",".join(filter(None, [FIELDS, self.reasons[0]]))
                text = self._run(["--query-gpu=" + fields, "--format=csv,noheader,nounits"])
                if "not a valid field" not in text or len(self.reasons) == 1:
                    break
                self.reasons.pop(0)
            if self.with_apps and not self.killed:
                self.apps = self._run(
                    ["--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
                )
            self.answer = {"text": text, "fields": fields.split(",")}
        except OSError as error:
            self.answer = {"text": "nvidia-smi: %s" % error.strerror, "fields": []}
        finally:
            self.took_s = time.monotonic() - self.began
            self.done.set()

    def _run(self, args):
        with subprocess.Popen(
            ["nvidia-smi"] + args,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as self.child:
            if self.killed:  # meanwhile
                self.kill()
            text = self.child.stdout.read(MOST_SMI_BYTES + 1)
            if len(text) > MOST_SMI_BYTES:
                self.kill()
                raise OSError(errno.EFBIG, "it prints more than %d KiB" % (MOST_SMI_BYTES >> 10))
        return text.decode("utf-8", "replace")


class Smi:
    """nvidia-smi, queried repeatedly."""

    def __init__(self, retry_s):
        self.retry_s = retry_s  # until one that does not answer is replaced
        self.reasons = list(REASONS)
        self.query, self.stuck = None, []  # under way; killed, but not gone
        self.answer, self.apps = None, None
        self.answered = self.took_s = 0.0
        self.silent_since = None  # when the first query without an answer began

    def ask(self, with_apps):
        """Start a query, unless one is under way. One that hangs is replaced, unless too many are stuck in the driver."""
        self.stuck = [query for query in self.stuck if not query.done.is_set()]
        if self.query and time.monotonic() > self.query.began + self.retry_s:
            self.query.kill()
            self.stuck.append(self.query)
            self.query = None
        if self.query is None and len(self.stuck) < MOST_STUCK:
            if shutil.which("nvidia-smi"):
                self.query = Query(self.reasons, with_apps)
                self.silent_since = self.silent_since or self.query.began
            else:
                self.silent_since = None

    def state(self):
        """The newest answer, its age, and how long there has been none."""
        if self.query and self.query.done.wait(SMI_WAIT_S):
            self.answer = self.query.answer
            if self.query.apps is not None:  # "": no process is on a GPU any more
                self.apps = self.query.apps
            self.answered, self.took_s = time.monotonic(), self.query.took_s
            self.query = self.silent_since = None
        now = time.monotonic()
        hung_s = round(now - (self.silent_since or now), 1)
        if self.answer is None:
            return {"text": None, "hung_s": hung_s}
        age_s, took_s = round(now - self.answered, 1), round(self.took_s, 3)
        return dict(self.answer, apps=self.apps, age_s=age_s, took_s=took_s, hung_s=hung_s)

    def end(self):
        """Leave no child process behind, if the driver lets go of it."""
        if self.query:
            self.query.kill()


class KernelLog:
    """Lines of the kernel's log about GPUs and memory since the boot, if this user may read it."""

    WORDS = re.compile(rb"NVRM: Xid|Out of memory: Killed process|oom-kill")
    RECORD = re.compile(rb"\d+,\d+,(\d+),[^;]*;(.*)")  # priority, number, microseconds, flags; text

    def __init__(self, path="/dev/kmsg"):
        try:
            self.file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            self.file = None
        self.most = FIRST_KERNEL_RECORDS
        self.read_at = 0.0  # all that was logged until then has been read

    def new(self):
        """Lines since the last call, at first since the boot, the newest if they are many; None if this user may not read them.

        Each with its time in seconds since the epoch, by the host's clock.
        """
        if self.file is None:
            return None
        records, until = collections.deque(maxlen=MOST_KERNEL_LINES), time.time()
        for record in self._records():
            if self.WORDS.search(record):
                records.append(record)
        found = [self._timed(match, until) for match in map(self.RECORD.match, records) if match]
        self.most, self.read_at = MOST_KERNEL_RECORDS, until
        return found

    def _records(self):
        for _ in range(self.most):
            try:
                record = os.read(self.file, 8192)
            except BrokenPipeError:  # overwritten before it was read
                continue
            except OSError:  # BlockingIOError: there are no more
                return
            if not record:
                return
            yield record

    def _timed(self, match, now):
        """The time and the text of a record.

        The kernel stamps records with its scheduler's clock, which like CLOCK_MONOTONIC starts with the boot and stands while
        the machine sleeps. No clock corrects it, so it may part from CLOCK_MONOTONIC by seconds in weeks. That does not matter
        for lines from before, which belong to an attempt of hours or to none; newer lines came since the last look.
        """
        logged = now - time.monotonic() + int(match.group(1)) / 1e6
        text = match.group(2).decode("utf-8", "replace").strip()
        return min(max(logged, self.read_at), now), text[:300]


class Run:
    """The run that is meant: what its files on this host say."""

    def __init__(self, request):
        self.request = request
        self.path = self.plan = self.node = None
        self.plan_mark, self.sent_mark = None, None
        self.metrics_at = None  # inode and offset
        self.guard = None  # what the run's guard last told this host
        self.saved_step = None  # of the newest checkpoint
        self.unsaved = ""  # why the newest save failed
        self.unsent = ""  # where the user's command after a save fails, and why
        self.usual_s = {}  # seconds in the median by phase
        self.logs, self.net = [], ""
        self.stay, self.said = (
            request.get("stay"),
            b"",
        )  # the name of a run, and input after the last complete line
        self.others = []  # names of the other runs that are alive here

    def hear(self, data):
        """Take input from the operator: lines of JSON that name the run to stay with; empty ones only show it is there."""
        *lines, self.said = (self.said + data).split(b"\n")
        for line in filter(None, lines):
            self.stay = json.loads(line.decode())["stay"]

    def frame(self, slow):
        """Everything that changed, and the ranks' present state."""
        self._find()
        if self.plan is None:
            return None
        if slow:
            self._look_at_logs()
            self.guard = self._guard()
            self._look_at_events()
            if self.request.get("run"):  # else they are known already
                self.others = self._others()
        if slow or self.node["first_rank"] == 0:  # often by one host alone: all others read the same directory
            self.saved_step = self._checkpoint_step()
        ranks = range(self.node["first_rank"], self.node["first_rank"] + self.node["slots"])
        found = {
            "name": os.path.basename(self.path),
            "created": self.plan["created"],
            "run_created": self._first_launched(),
            "attempt": self.plan["attempt"],
            "alive": self._is_alive(),
            "status": self._status(".json") or None,
            "blame": self._blame(),
            "guard": self.guard,
            "beats": [beat for beat in map(self._beat, ranks) if beat],
            "log_age_s": self._log_age_s(),
            "net": self.net,
            "others": self.others,
            "checkpoint_step": self.saved_step,
            "copied_step": self._copied_step(),
        }
        if self.sent_mark != self.plan_mark:
            self.sent_mark = self.plan_mark
            found["nodes"] = [[node["name"], node["first_rank"], node["slots"]] for node in self.plan["nodes"]]
            found["trains"] = self.plan.get("program", TRAINER)[:2] == TRAINER
            found["expected_step_s"] = self.plan.get("expected_step_s", 0.0)
            found["load_s"] = self.plan.get("load_s", 0.0)
            found["mesh"] = self.plan.get("mesh")
            found["nccl"] = {k: v for k, v in self.node["env"].items() if k.startswith("NCCL_")}
        if self.node["first_rank"] == 0:
            found.update(self._of_head())
        return found

    def _of_head(self):
        """What only rank 0's host knows."""
        steps = re.findall(r"^max_steps = (\d+)", read(self.path + "/config.toml"), re.M)
        return {
            "metrics": self._metrics(),
            "max_steps": next(map(int, steps), None),
            "unsaved": self.unsaved,
            "unsent": self.unsent,
            "usual_s": self.usual_s,
        }

    def _look_at_events(self):
        """Find why the newest save failed, and how long saves take; of rank 0's host alone, which tells that."""
        if self.node["first_rank"] == 0:
            events = list(self._newest_events())
            saves = [event for event in events if event.get("kind") in SAVES]
            beat = self._beat(0) if self._is_alive() else None
            self.unsaved = unsaved(saves, self.plan["attempt"]) or overdue(saves, time.time(), beat or {})
            self.usual_s = usual_s(saves)
            self.unsent = unsent(events, self.plan["attempt"])

    def _newest_events(self):
        try:
            with open(self.path + "/events/rank-0.jsonl", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_EVENTS_BYTES))
                lines = file.read(LAST_EVENTS_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        return filter(None, map(parse_object, lines))

    def _first_launched(self):
        """When its first attempt began here: its node runner made the lock, into which nothing is ever written."""
        try:
            return os.stat(self._lock(self.path)).st_mtime
        except OSError:
            return None

    def _status(self, suffix):
        """Return a file that the node runner wrote; {} if there is none."""
        return read_object("%s/status/%s%s" % (self.path, self.request["host"], suffix)) or {}

    def _copied_step(self):
        """The newest checkpoint of which the next host has this one's part; None: nothing is copied."""
        ring = "%s/status/.%s.ring" % (self.path, self.request["host"])
        return self._status(".copied").get("step", 0) if os.path.exists(ring) else None

    def _blame(self):
        """Return why the last attempt that failed did, if whoever ended it has recorded that."""
        lines = read("%s/status/%s.blames.jsonl" % (self.path, self.request["host"])).splitlines()
        return parse_object(lines[-1]) if lines else None

    def _guard(self):
        """Return what the run's guard, if one was asked for, last told this host; and whether it died here since."""
        said = self._status(".guard")
        found = {key: value for key, value in said.items() if key not in UNSENT}
        if has_died_here(found):
            found["died"] = True
        return found or None

    def names(self):
        """The runs that there are instead of the one requested, the newest first."""
        plans = glob.glob("runs/*/plan.json") if self.request.get("run") else []
        try:
            plans.sort(key=os.path.getmtime, reverse=True)
        except OSError:  # one is just being deleted
            pass
        return [os.path.basename(os.path.dirname(path)) for path in plans[:20]]

    def _find(self):
        """Find the run to stay with, if this host has it; else the newest live one, else the newest."""
        plans = self._plans()
        if not plans:
            self.plan = None
            return
        best = max(plans, key=lambda entry: entry[:2])
        for entry in plans:
            if os.path.basename(entry[2]) == self.stay:
                best = entry
        if not self.request.get("run"):
            self.others = sorted(os.path.basename(entry[2]) for entry in plans if entry[0] and entry is not best)
        _, _, path, mark, plan, node = best
        if mark != self.plan_mark:
            if path != self.path:
                self.metrics_at = None
            self.path, self.plan, self.plan_mark, self.node = path, plan, mark, node
            self.logs, self.net, self.guard, self.unsaved, self.usual_s = [], "", self._guard(), "", {}
            self.unsent = ""
            self._look_at_logs()
            self._look_at_events()
            self.saved_step = self._checkpoint_step()

    def _plans(self):
        """The runs of this host: whether alive, when created, path, a mark that changes with the plan, plan and node."""
        found = []
        for file in glob.glob("runs/%s/plan.json" % (glob.escape(self.request.get("run") or "") or "*")):
            path = os.path.dirname(os.path.abspath(file))
            try:
                info = os.stat(file)
                mark = (path, info.st_mtime_ns, info.st_ino)
                plan = self.plan
                if mark != self.plan_mark:
                    plan = read_object(file)
                nodes = [node for node in plan["nodes"] if node["name"] == self.request["host"]]
                if nodes:
                    found.append((self._held(path), float(plan["created"]), path, mark, plan, nodes[0]))
            except (OSError, TypeError, KeyError, ValueError):
                continue
        return found

    def _others(self):
        """The other runs that are alive here."""
        locks = glob.glob("runs/*/status/%s.lock" % glob.escape(self.request["host"]))
        names = {lock.split("/")[1] for lock in locks} - {os.path.basename(self.path)}
        return sorted(name for name in names if self._held("runs/" + name))

    def _lock(self, path):
        return "%s/status/%s.lock" % (path, self.request["host"])

    def _held(self, path):
        """Whether the node runner (or its guardian) holds the run's lock here."""
        try:
            handle = os.open(self._lock(path), os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    def _is_alive(self):
        running = self._status(".json").get("state") in ("starting", "running")
        if self.plan.get("slurm_job"):  # the lock is held on the node, not here
            return running
        copies = self.plan.get("replicates")  # which may go on when the ranks have ended
        return self._held(self.path) and (running or not copies)

    def _beat(self, rank):
        beat = read_object("%s/heartbeat/rank-%d.json" % (self.path, rank))
        if beat is not None and self.request.get("elsewhere"):
            beat["state"] = "?"
        elif beat is not None:
            beat["state"] = read("/proc/%s/stat" % beat.get("pid")).rpartition(") ")[2][:1]
        return beat

    def _look_at_logs(self):
        """Find this attempt's log files, and the network that NCCL says it uses."""
        folder = "%s/logs/%s" % (self.path, self.request["host"])
        self.logs = glob.glob("%s/%s*/attempt_*/*/*.log" % (folder, glob.escape(self.plan["rdzv_id"])))
        for path in self.logs:
            if self.net:
                return
            try:
                with open(path, "rb") as file:
                    text = file.read(NCCL_SEARCH_BYTES)
            except OSError:
                continue
            self.net = next((name for words, name in NETWORKS if words in text), "")

    def _log_age_s(self):
        written = []
        for path in self.logs:
            try:
                info = os.stat(path)
            except OSError:
                continue
            if info.st_size:
                written.append(info.st_mtime)
        return round(time.time() - max(written), 1) if written else None

    def _metrics(self):
        """Metrics that were added since the last call."""
        try:
            with open(self.path + "/metrics.jsonl", "rb") as file:
                info = os.fstat(file.fileno())
                inode, offset = self.metrics_at or (info.st_ino, max(0, info.st_size - FIRST_METRICS_BYTES))
                if inode != info.st_ino or offset > info.st_size:
                    offset = 0
                file.seek(offset)
                data = file.read(FIRST_METRICS_BYTES)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        if not end and len(data) == FIRST_METRICS_BYTES:  # no record is that long
            end = len(data)
        self.metrics_at = (info.st_ino, offset + end)
        found = []
        for line in data[:end].splitlines():
            try:
                found.append(json.loads(line.decode()))
            except ValueError:  # the first may be cut
                continue
        return [metrics for metrics in found if isinstance(metrics, dict)]

    def _checkpoint_step(self):
        """The newest step whose checkpoint is complete; None: there is none."""
        root = self.plan.get("checkpoint_dir") or self.path + "/checkpoints"
        try:
            names = sorted(filter(STEP_DIR.match, os.listdir(root)), reverse=True)
        except OSError:
            return None
        return next((int(name[5:]) for name in names if os.path.exists("%s/%s/manifest.json" % (root, name))), None)


def unsaved(saves, attempt):
    """Why the newest save failed; "" if it did not, or this attempt has not saved yet."""
    if not saves or saves[-1]["kind"] == "saved" or saves[-1].get("attempt") != attempt:
        return ""
    return "step %s: %s" % (saves[-1].get("step"), str(saves[-1].get("detail"))[:300])


def overdue(saves, now, beat):
    """Say that a save takes three times its usual time, or that a checkpoint is late by two intervals; "" if neither.

    ``beat``: of rank 0, which tells since when a save is due or under way, and how long it is from save to save as configured.
    """
    saved = [event for event in saves if event["kind"] == "saved" and isinstance(event.get("time"), float)]
    pairs = [pair for pair in zip(saved, saved[1:]) if pair[0].get("attempt") == pair[1].get("attempt")]  # noqa: RUF007 - Python 3.6
    between = [later["time"] - earlier["time"] for earlier, later in pairs[-LAST_INTERVALS:]]  # or asked for
    every_s, took_s = max([beat.get("save_every_s") or 0.0] + between), usual_s(saves).get("checkpoint")
    late_s = now - (beat.get("save_since") or now)
    if took_s and late_s > 3 * max(LEAST_S, took_s):
        return "for %d s, in a save that usually takes %.1f s" % (late_s, took_s)
    return "for %d s, usually every %d s" % (late_s, every_s) if every_s and late_s > 2 * max(LEAST_S, every_s) else ""


def unsent(events, attempt):
    """Where the user's command after a save fails in this attempt, and why; "" if it does not."""
    told = [event for event in events if event.get("kind") in AFTER_SAVES and event.get("attempt") == attempt]
    return str(told[-1].get("detail"))[:300] if told and told[-1]["kind"] == AFTER_SAVES[1] else ""


def usual_s(saves):
    """Seconds in the median (the upper one of two) that saves have taken, as the phase in which training waits for one."""
    took_s = [event.get("took_s") for event in saves if event["kind"] == "saved"]
    took_s = sorted(each for each in took_s if isinstance(each, (int, float)) and 0 < each < MOST_SAVE_S)
    return {"checkpoint": took_s[len(took_s) // 2]} if took_s else {}


def pci_gpus():
    """How many NVIDIA GPUs the kernel sees."""
    nvidia = [path for path in glob.glob("/sys/bus/pci/devices/*") if read(path + "/vendor").strip() == "0x10de"]
    return sum(read(path + "/class").startswith("0x03") for path in nvidia)


def cpu():
    """Ticks since boot, in all and idle."""
    ticks = [int(word) for word in read("/proc/stat").partition("\n")[0].split()[1:9]]
    return {
        "total": sum(ticks),
        "idle": sum(ticks[3:5]),
        "cores": os.cpu_count(),
        "load": read("/proc/loadavg").split()[:1],
    }


def memory():
    """Bytes of memory, and how many processes were killed for lack of it."""
    found = {}
    for line in read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[name] = int(rest.split()[0]) * 1024
    kills = re.findall(r"^oom_kill (\d+)", read("/proc/vmstat"), re.M)
    return {
        "total": found.get("MemTotal"),
        "available": found.get("MemAvailable"),
        "oom_kills": next(map(int, kills), None),
    }


def disks(paths):
    """Bytes free and in total, where the run writes."""
    found = []
    for path in paths:
        try:
            stat = os.statvfs(path)
        except OSError:
            continue
        found.append([path, stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize])
    return found


def network():
    """Bytes received and sent by each interface, except loopback, bridges and containers."""
    found = {}
    for line in read("/proc/net/dev").splitlines()[2:]:
        name, _, rest = line.partition(":")
        words, name = rest.split(), name.strip()
        if name != "lo" and not name.startswith(("veth", "docker", "br-", "virbr")):
            found[name] = [int(words[0]), int(words[8])]
    return found


def infiniband():
    """Each port's rate, state, bytes and error counters."""
    found = []
    for path in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        counters = {}
        for folder, names in (
            ("counters", ("port_rcv_data", "port_xmit_data", "symbol_error", "link_downed", "port_rcv_errors")),
            ("hw_counters", ("out_of_sequence", "packet_seq_err", "roce_adp_retrans")),
        ):
            for name in names:
                text = read("%s/%s/%s" % (path, folder, name)).strip()
                if text.isdigit():
                    counters[name] = int(text)
        device = path.split("/")[4]
        state, rate = read(path + "/state").strip(), read(path + "/rate").strip()
        found.append(
            {"device": device, "port": path.split("/")[-1], "state": state, "rate": rate, "counters": counters}
        )
    return found


def processes(marker):
    """The run's processes on this host: pid, state, ticks of CPU, resident bytes, local rank, command."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if len(found) == MOST_PROCESSES:
            break
        try:
            with open("/proc/%s/environ" % pid, "rb") as file:
                environ = file.read().split(b"\0")
            if MARKER + marker not in environ:
                continue
            command = command_of(pid)
        except OSError:
            continue
        words = read("/proc/%s/stat" % pid).rpartition(") ")[2].split()
        if len(words) > 21:
            ranks = [item[5:].decode() for item in environ if item.startswith(b"RANK=")]
            ticks, pages = int(words[11]) + int(words[12]), int(words[21])
            found.append([int(pid), words[0], ticks, pages * os.sysconf("SC_PAGE_SIZE"), "".join(ranks[:1]), command])
    return found


def command_of(pid):
    """The beginning of a process's command line."""
    with open("/proc/%s/cmdline" % pid, "rb") as file:
        words = file.read().rstrip(b"\0").split(b"\0")
    if len(words) > 4 and words[2] == b"-c" and b"run_module" in words[3]:  # ours, see contract/software.py
        words[1:4] = [b"-m"]
    return b" ".join(words).decode("utf-8", "replace").strip()[:MOST_COMMAND]


def moved(pids):
    """Bytes that each process has read and written so far; without those of which the kernel does not tell.

    ``rchar`` and ``wchar`` are what it asked for by read and write, from wherever that came; ``read_bytes`` is what was fetched
    from a disk for it, which is all that tells of a file that is memory-mapped, as weights are. What is in both counts twice:
    the sum only says whether it moves. It does not count what goes through sockets by send and recv.
    """
    found = []
    for pid in pids:
        counts = re.findall(r"^(?:rchar|wchar|read_bytes): (\d+)$", read("/proc/%d/io" % pid), re.M)
        if counts:
            found.append([pid, sum(map(int, counts))])
    return found


def foreign(apps, ours):
    """Processes that nvidia-smi lists on GPUs and that are not of the run: pid, user, command; None if it has listed none yet.

    ``ours``: pids of the run. What nobody here knows (it has ended, or is of another pid namespace) has no user and no command.
    """
    if apps is None:
        return None
    pids = {int(pid) for pid in re.findall(r"^\s*(\d{1,9})\s*,", apps, re.M)}
    return [[pid] + user_and_command(pid) for pid in sorted(pids)[:MOST_PROCESSES] if not is_of(pid, ours)]


def user_and_command(pid):
    """The user and the command of a process; empty if it is not known here."""
    try:
        return [user_name(os.stat("/proc/%d" % pid).st_uid), command_of(pid)]
    except OSError:
        return ["", ""]


@functools.lru_cache(1000)
def user_name(uid):
    """A user's name, wherever this host looks names up; the number if that does not answer soon."""
    try:
        done = subprocess.run(
            ["getent", "passwd", str(uid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=USER_WAIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return str(uid)
    return done.stdout.partition(b":")[0].decode("utf-8", "replace") or str(uid)


def is_of(pid, ours):
    """Whether a process is one of these, or was started by one of them, at whatever depth."""
    for _ in range(MOST_PARENTS):
        if pid in ours or pid <= 1:
            return pid in ours
        words = read("/proc/%d/stat" % pid).rpartition(") ")[2].split()
        pid = int(words[1]) if len(words) > 1 else 0
    return False


def pids_of(procs, state):
    """The run's processes here: those with its mark, and, as another user cannot read that, those that its files name."""
    found = {process[0] for process in procs}
    if state and state["alive"]:
        found.update(beat.get("pid") for beat in state["beats"])
        found.add((state["status"] or {}).get("pid"))
    return found


class Machine:
    """This machine, apart from its runs."""

    def __init__(self, smi):
        self.smi, self.kernel = smi, KernelLog()
        self.name = read("/proc/sys/kernel/random/boot_id").strip() + socket.gethostname()
        self.pci_gpus = 0

    def begin(self, slow):
        """Start what takes a while."""
        self.smi.ask(slow)
        if slow:
            self.pci_gpus = pci_gpus()

    def frame(self):
        """Its part of a frame."""
        lines = self.kernel.new()
        return {
            "machine": self.name,
            "pci_gpus": self.pci_gpus,
            "cpu": cpu(),
            "memory": memory(),
            "net": network(),
            "ib": infiniband(),
            "kernel": lines and [text for _, text in lines],
            "kernel_times": [round(logged, 3) for logged, _ in lines or []],
            "smi": self.smi.state(),
        }

    def slow_frame(self, run, state):
        """Its part of a frame that costs more: the processes of the run, what they move, and what else is on the GPUs."""
        procs = [] if run.plan is None else processes(("%s:%s" % (run.path, run.request["host"])).encode())
        return {
            "procs": procs,
            "io": moved(process[0] for process in procs if process[4]),
            "foreign": foreign(self.smi.apps, pids_of(procs, state)),
        }


class Elsewhere:
    """A host whose files are on this machine but which is another machine."""

    def __init__(self, name):
        self.name = name

    def begin(self, slow):
        """Do nothing: the host cannot be queried."""

    def frame(self):
        """Its part of a frame."""
        return {
            "machine": self.name,
            "pci_gpus": None,
            "cpu": {"total": 0, "idle": 0, "cores": None},
            "memory": {"total": None, "available": None, "oom_kills": None},
            "net": {},
            "ib": [],
            "kernel": None,
            "smi": {"text": None, "hung_s": 0.0},
        }

    def slow_frame(self, run, state):  # noqa: ARG002
        """Its part of a frame that costs more: no process is on this machine."""
        return {"procs": []}


def main():
    """Write frames until nobody listens, or until a signal."""
    request = json.loads(sys.stdin.buffer.readline().decode())
    smi = Smi(request["smi_retry_s"])

    def leave(*_):
        sys.exit()  # no OSError, which what is interrupted may take for its own

    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        write_frames(request, smi)
    except BrokenPipeError:
        pass
    finally:
        smi.end()


def came_along():
    """Return input that was read from the pipe together with the request."""
    os.set_blocking(0, False)
    try:
        return sys.stdin.buffer.peek()
    finally:
        os.set_blocking(0, True)


def write_frames(request, smi):
    """Write frames until nothing has been received for a while."""
    workdir, run = os.path.expanduser(request["workdir"]), Run(request)
    os.chdir(workdir if os.path.isdir(workdir) else "/")
    run.hear(came_along())
    machine = Elsewhere(request["host"]) if request.get("elsewhere") else Machine(smi)
    heard, slow_at, tick = time.monotonic(), 0.0, time.monotonic()
    while time.monotonic() - heard < request["deaf_s"]:
        slow = time.monotonic() >= slow_at
        machine.begin(slow)
        state = run.frame(slow)
        frame = {
            **machine.frame(),
            "cwd": workdir,
            "slots": request.get("slots", 0),
            "disks": disks(dict.fromkeys(filter(None, [os.getcwd(), (run.plan or {}).get("checkpoint_dir")]))),
            "run": state,
            "runs": [] if state else run.names(),
            "own": [round(time.process_time(), 3), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss],
            "now": time.time(),
        }
        if slow:
            slow_at = time.monotonic() + SLOW_EVERY_S
            frame.update(machine.slow_frame(run, state))
        sys.stdout.write(json.dumps(frame) + "\n")
        sys.stdout.flush()
        tick = max(tick + request["interval_s"], time.monotonic())
        while select.select([sys.stdin], [], [], max(0.0, tick - time.monotonic()))[0]:
            said = os.read(0, 4096)
            if not said:
                return
            run.hear(said)
            heard = time.monotonic()


if __name__ == "__main__":
    main()
