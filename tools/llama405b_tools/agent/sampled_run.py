"""What a run's files on a host say, for the sampler, which is sent together with this file. Any python3 from 3.6 on."""

import fcntl
import glob
import json
import os
import re
import socket
import time

MAX_FILE_BYTES = 2 << 20  # the kernel gives nothing of /proc/sys to who asks for more than 4 MiB
MAX_SAVE_S = 1e9  # longer ones are not believed
FIRST_METRICS_BYTES = 256 << 10
LAST_EVENTS_BYTES = 64 << 10
SAVE_EVENTS = ("saved", "not saved")  # the kinds of events
LAST_INTERVALS = 5  # of which the longest is usual
MIN_INTERVAL_S = 10.0  # of a save, and between saves: those that are faster are not missed
AFTER_SAVE_EVENTS = ("after save", "after save failed")
NCCL_SEARCH_BYTES = 1 << 20
NETWORKS = (
    (b"NET/IB : Using [", "IB"),
    (b"NET/OFI Selected", "EFA"),
    (b"NET/Socket : Using [", "SOCKET"),
)  # NCCL's words
TRAINER = ["-m", "llama405b.train"]
OMITTED_GUARD_FIELDS = ("command", "directory", "message", "cause")  # of what a guard says
STEP_DIR = re.compile(r"step-\d{8}$")


def read_small_text(path, default=""):
    """Return a small file's text."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_FILE_BYTES)
    except (OSError, ValueError):
        return default


def read_object(path):
    """Return a JSON object from a file, or None."""
    return parse_object(read_small_text(path))


def parse_object(text):
    """Return a JSON object from a text, or None."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def has_died_here(guard):
    """Return whether a guard ran on this machine, in this boot or an earlier one, and is gone."""
    ids = read_small_text("/etc/machine-id") + " " + read_small_text("/proc/sys/kernel/random/boot_id")
    machine, local_machine = str(guard.get("machine")).split(), [socket.gethostname()] + ids.split()
    if not guard.get("pid") or (machine != local_machine and (len(machine) != 3 or machine[:2] != local_machine[:2])):
        return False
    fields = read_small_text("/proc/%s/stat" % guard["pid"]).rpartition(") ")[2].split()
    is_running = len(fields) > 19 and fields[0] not in "ZX" and fields[19] == str(guard.get("pid_start"))
    return machine != local_machine or not is_running


class SampledRun:
    """The requested run, as its files on this host describe it."""

    def __init__(self, request):
        self.request = request
        self.path = self.plan = self.node = None
        self.plan_version, self.sent_version = None, None
        self.metrics_position = None  # inode and offset
        self.guard = None  # what the run's guard last told this host
        self.saved_step = None  # of the newest checkpoint
        self.save_error = ""  # why the newest save failed
        self.after_save_error = ""  # where the user's command after a save fails, and why
        self.usual_phase_s = {}  # seconds in the median by phase
        self.logs, self.nccl_network = [], ""
        self.followed_run, self.partial_input = (
            request.get("stay"),
            b"",
        )  # the name of a run, and input after the last complete line
        self.other_runs = []  # names of the other runs that are alive here

    def read_input(self, data):
        """Read input from the operator: lines of JSON that name the run to follow; empty lines are keepalives."""
        *lines, self.partial_input = (self.partial_input + data).split(b"\n")
        for line in filter(None, lines):
            self.followed_run = json.loads(line.decode())["stay"]

    def frame(self, is_slow):
        """Return everything that changed, and the ranks' present state."""
        self._find_run()
        if self.plan is None:
            return None
        if is_slow:
            self._find_logs()
            self.guard = self._read_guard()
            self._read_events()
            if self.request.get("run"):  # else they are known already
                self.other_runs = self._other_live_runs()
        if is_slow or self.node["first_rank"] == 0:  # often by one host alone: all others read the same directory
            self.saved_step = self._checkpoint_step()
        ranks = range(self.node["first_rank"], self.node["first_rank"] + self.node["slots"])
        facts = {
            "name": os.path.basename(self.path),
            "created": self.plan["created"],
            "run_created": self._first_launch_time(),
            "attempt": self.plan["attempt"],
            "alive": self._is_alive(),
            "status": self._status(".json") or None,
            "blame": self._read_failure(),
            "guard": self.guard,
            "beats": [beat for beat in map(self._read_heartbeat, ranks) if beat],
            "log_age_s": self._log_age_s(),
            "net": self.nccl_network,
            "others": self.other_runs,
            "checkpoint_step": self.saved_step,
            "copied_step": self._copied_step(),
        }
        if self.sent_version != self.plan_version:
            self.sent_version = self.plan_version
            facts["nodes"] = [[node["name"], node["first_rank"], node["slots"]] for node in self.plan["nodes"]]
            facts["trains"] = self.plan.get("program", TRAINER)[:2] == TRAINER
            facts["expected_step_s"] = self.plan.get("expected_step_s", 0.0)
            facts["load_s"] = self.plan.get("load_s", 0.0)
            facts["mesh"] = self.plan.get("mesh")
            facts["nccl"] = {k: v for k, v in self.node["env"].items() if k.startswith("NCCL_")}
        if self.node["first_rank"] == 0:
            facts.update(self._head_facts())
        return facts

    def _head_facts(self):
        """Return what only rank 0's host knows."""
        steps = re.findall(r"^max_steps = (\d+)", read_small_text(self.path + "/config.toml"), re.M)
        return {
            "metrics": self._new_metrics(),
            "max_steps": next(map(int, steps), None),
            "unsaved": self.save_error,
            "unsent": self.after_save_error,
            "usual_s": self.usual_phase_s,
        }

    def _read_events(self):
        """Find why the newest save failed and how long saves take; only on rank 0's host, which reports that."""
        if self.node["first_rank"] == 0:
            events = list(self._newest_events())
            saves = [event for event in events if event.get("kind") in SAVE_EVENTS]
            beat = self._read_heartbeat(0) if self._is_alive() else None
            self.save_error = save_failure(saves, self.plan["attempt"]) or overdue_save(saves, time.time(), beat or {})
            self.usual_phase_s = median_save_s(saves)
            self.after_save_error = after_save_failure(events, self.plan["attempt"])

    def _newest_events(self):
        try:
            with open(self.path + "/events/rank-0.jsonl", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_EVENTS_BYTES))
                lines = file.read(LAST_EVENTS_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        return filter(None, map(parse_object, lines))

    def _first_launch_time(self):
        """Return when its first attempt began here.

        The node runner created the lock file then, and nothing ever writes to it.
        """
        try:
            return os.stat(self._lock_path(self.path)).st_mtime
        except OSError:
            return None

    def _status(self, suffix):
        """Return a file that the node runner wrote; {} if there is none."""
        return read_object("%s/status/%s%s" % (self.path, self.request["host"], suffix)) or {}

    def _copied_step(self):
        """Return the newest checkpoint of which the next host has this host's part; None: nothing is copied."""
        ring = "%s/status/.%s.ring" % (self.path, self.request["host"])
        return self._status(".copied").get("step", 0) if os.path.exists(ring) else None

    def _read_failure(self):
        """Return why the last failed attempt failed, if whoever ended it has recorded that."""
        lines = read_small_text("%s/status/%s.blames.jsonl" % (self.path, self.request["host"])).splitlines()
        return parse_object(lines[-1]) if lines else None

    def _read_guard(self):
        """Return the guard's last note to this host, if the run has a guard.

        It also says whether the guard has died on this machine since.
        """
        guard_note = self._status(".guard")
        guard = {key: value for key, value in guard_note.items() if key not in OMITTED_GUARD_FIELDS}
        if has_died_here(guard):
            guard["died"] = True
        return guard or None

    def list_names(self):
        """Return the runs on this host other than the requested one, newest first."""
        plans = glob.glob("runs/*/plan.json") if self.request.get("run") else []
        try:
            plans.sort(key=os.path.getmtime, reverse=True)
        except OSError:  # one is just being deleted
            pass
        return [os.path.basename(os.path.dirname(path)) for path in plans[:20]]

    def _find_run(self):
        """Find the run to follow, if this host has it; else the newest live run, else the newest."""
        plans = self._list_plans()
        if not plans:
            self.plan = None
            return
        best = max(plans, key=lambda entry: entry[:2])
        for entry in plans:
            if os.path.basename(entry[2]) == self.followed_run:
                best = entry
        if not self.request.get("run"):
            self.other_runs = sorted(os.path.basename(entry[2]) for entry in plans if entry[0] and entry is not best)
        _, _, path, version, plan, node = best
        if version != self.plan_version:
            if path != self.path:
                self.metrics_position = None
            self.path, self.plan, self.plan_version, self.node = path, plan, version, node
            self.logs, self.nccl_network, self.guard, self.save_error, self.usual_phase_s = (
                [],
                "",
                self._read_guard(),
                "",
                {},
            )
            self.after_save_error = ""
            self._find_logs()
            self._read_events()
            self.saved_step = self._checkpoint_step()

    def _list_plans(self):
        """Return the runs of this host: alive, creation time, path, version of the plan file, plan and node."""
        entries = []
        for file in glob.glob("runs/%s/plan.json" % (glob.escape(self.request.get("run") or "") or "*")):
            path = os.path.dirname(os.path.abspath(file))
            try:
                info = os.stat(file)
                version = (path, info.st_mtime_ns, info.st_ino)
                plan = self.plan
                if version != self.plan_version:
                    plan = read_object(file)
                nodes = [node for node in plan["nodes"] if node["name"] == self.request["host"]]
                if nodes:
                    entries.append((self._is_locked(path), float(plan["created"]), path, version, plan, nodes[0]))
            except (OSError, TypeError, KeyError, ValueError):
                continue
        return entries

    def _other_live_runs(self):
        """Return the other live runs on this host."""
        locks = glob.glob("runs/*/status/%s.lock" % glob.escape(self.request["host"]))
        names = {lock.split("/")[1] for lock in locks} - {os.path.basename(self.path)}
        return sorted(name for name in names if self._is_locked("runs/" + name))

    def _lock_path(self, path):
        return "%s/status/%s.lock" % (path, self.request["host"])

    def _is_locked(self, path):
        """Return whether the node runner (or its guardian) holds the run's lock here."""
        try:
            handle = os.open(self._lock_path(path), os.O_RDWR)
        except OSError:
            return False
        try:
            # Shared, so that two checks at the same time do not take each other for the holder.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    def _is_alive(self):
        is_running = self._status(".json").get("state") in ("starting", "running")
        if self.plan.get("slurm_job"):  # the lock is held on the node, not here
            return is_running
        replicates = self.plan.get("replicates")  # which may go on when the ranks have ended
        return self._is_locked(self.path) and (is_running or not replicates)

    def _read_heartbeat(self, rank):
        beat = read_object("%s/heartbeat/rank-%d.json" % (self.path, rank))
        if beat is not None and self.request.get("elsewhere"):
            beat["state"] = "?"
        elif beat is not None:
            beat["state"] = read_small_text("/proc/%s/stat" % beat.get("pid")).rpartition(") ")[2][:1]
        return beat

    def _find_logs(self):
        """Find this attempt's log files, and the network that NCCL says it uses."""
        folder = "%s/logs/%s" % (self.path, self.request["host"])
        self.logs = glob.glob("%s/%s*/attempt_*/*/*.log" % (folder, glob.escape(self.plan["rdzv_id"])))
        for path in self.logs:
            if self.nccl_network:
                return
            try:
                with open(path, "rb") as file:
                    text = file.read(NCCL_SEARCH_BYTES)
            except OSError:
                continue
            self.nccl_network = next((name for words, name in NETWORKS if words in text), "")

    def _log_age_s(self):
        mtimes = []
        for path in self.logs:
            try:
                info = os.stat(path)
            except OSError:
                continue
            if info.st_size:
                mtimes.append(info.st_mtime)
        return round(time.time() - max(mtimes), 1) if mtimes else None

    def _new_metrics(self):
        """Return metrics added since the last call."""
        try:
            with open(self.path + "/metrics.jsonl", "rb") as file:
                info = os.fstat(file.fileno())
                inode, offset = self.metrics_position or (info.st_ino, max(0, info.st_size - FIRST_METRICS_BYTES))
                if inode != info.st_ino or offset > info.st_size:
                    offset = 0
                file.seek(offset)
                data = file.read(FIRST_METRICS_BYTES)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        if not end and len(data) == FIRST_METRICS_BYTES:  # no record is that long
            end = len(data)
        self.metrics_position = (info.st_ino, offset + end)
        records = []
        for line in data[:end].splitlines():
            try:
                records.append(json.loads(line.decode()))
            except ValueError:  # the first may be cut
                continue
        return [metrics for metrics in records if isinstance(metrics, dict)]

    def _checkpoint_step(self):
        """Return the newest step whose checkpoint is complete; None: there is none."""
        root = self.plan.get("checkpoint_dir") or self.path + "/checkpoints"
        try:
            names = sorted(filter(STEP_DIR.match, os.listdir(root)), reverse=True)
        except OSError:
            return None
        return next((int(name[5:]) for name in names if os.path.exists("%s/%s/manifest.json" % (root, name))), None)


def save_failure(saves, attempt):
    """Return why the newest save failed; "" if it did not, or this attempt has not saved yet."""
    if not saves or saves[-1]["kind"] == "saved" or saves[-1].get("attempt") != attempt:
        return ""
    return "step %s: %s" % (saves[-1].get("step"), str(saves[-1].get("detail"))[:300])


def overdue_save(saves, now, beat):
    """Return a clause if a save or the next checkpoint is overdue; "" if neither is.

    A save is overdue after three times its usual time, a checkpoint when it is late by two intervals.

    ``beat``: rank 0's heartbeat: since when a save is due or running, and the configured time between saves.
    """
    saved_events = [event for event in saves if event["kind"] == "saved" and isinstance(event.get("time"), float)]
    pairs = [pair for pair in zip(saved_events, saved_events[1:]) if pair[0].get("attempt") == pair[1].get("attempt")]  # noqa: RUF007 - Python 3.6
    intervals_s = [later["time"] - earlier["time"] for earlier, later in pairs[-LAST_INTERVALS:]]  # or asked for
    interval_s, typical_s = max([beat.get("save_every_s") or 0.0] + intervals_s), median_save_s(saves).get("checkpoint")
    late_s = now - (beat.get("save_since") or now)
    if typical_s and late_s > 3 * max(MIN_INTERVAL_S, typical_s):
        return "for %d s, in a save that usually takes %.1f s" % (late_s, typical_s)
    return (
        "for %d s, usually every %d s" % (late_s, interval_s)
        if interval_s and late_s > 2 * max(MIN_INTERVAL_S, interval_s)
        else ""
    )


def after_save_failure(events, attempt):
    """Return where and why the user's command after a save fails in this attempt; "" if it does not."""
    after_saves = [
        event for event in events if event.get("kind") in AFTER_SAVE_EVENTS and event.get("attempt") == attempt
    ]
    return (
        str(after_saves[-1].get("detail"))[:300]
        if after_saves and after_saves[-1]["kind"] == AFTER_SAVE_EVENTS[1]
        else ""
    )


def median_save_s(saves):
    """Return the median seconds of past saves, keyed by the phase in which training waits for a save.

    Of two medians, the upper one.
    """
    took_s = [event.get("took_s") for event in saves if event["kind"] == "saved"]
    took_s = sorted(seconds for seconds in took_s if isinstance(seconds, (int, float)) and 0 < seconds < MAX_SAVE_S)
    return {"checkpoint": took_s[len(took_s) // 2]} if took_s else {}
