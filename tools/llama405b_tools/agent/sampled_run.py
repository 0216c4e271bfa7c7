"""What a run's files on a host say, for the sampler, which is sent together with this file. Any python3 from 3.6 on."""

import fcntl
import glob
import json
import os
import re
import socket
import time

MOST_FILE_BYTES = 2 << 20  # the kernel gives nothing of /proc/sys to who asks for more than 4 MiB
MOST_SAVE_S = 1e9  # longer ones are not believed
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
    """Return whether a guard ran on this machine, in this boot or an earlier one, and is gone."""
    ids = read("/etc/machine-id") + " " + read("/proc/sys/kernel/random/boot_id")
    machine, here = str(guard.get("machine")).split(), [socket.gethostname()] + ids.split()
    if not guard.get("pid") or (machine != here and (len(machine) != 3 or machine[:2] != here[:2])):
        return False
    fields = read("/proc/%s/stat" % guard["pid"]).rpartition(") ")[2].split()
    lives = len(fields) > 19 and fields[0] not in "ZX" and fields[19] == str(guard.get("pid_start"))
    return machine != here or not lives


class Run:
    """The requested run, as its files on this host describe it."""

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
        """Read input from the operator: lines of JSON that name the run to follow; empty lines are keepalives."""
        *lines, self.said = (self.said + data).split(b"\n")
        for line in filter(None, lines):
            self.stay = json.loads(line.decode())["stay"]

    def frame(self, slow):
        """Return everything that changed, and the ranks' present state."""
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
        """Return what only rank 0's host knows."""
        steps = re.findall(r"^max_steps = (\d+)", read(self.path + "/config.toml"), re.M)
        return {
            "metrics": self._metrics(),
            "max_steps": next(map(int, steps), None),
            "unsaved": self.unsaved,
            "unsent": self.unsent,
            "usual_s": self.usual_s,
        }

    def _look_at_events(self):
        """Find why the newest save failed and how long saves take; only on rank 0's host, which reports that."""
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
        """Return when its first attempt began here.

        The node runner created the lock file then, and nothing ever writes to it.
        """
        try:
            return os.stat(self._lock(self.path)).st_mtime
        except OSError:
            return None

    def _status(self, suffix):
        """Return a file that the node runner wrote; {} if there is none."""
        return read_object("%s/status/%s%s" % (self.path, self.request["host"], suffix)) or {}

    def _copied_step(self):
        """Return the newest checkpoint of which the next host has this host's part; None: nothing is copied."""
        ring = "%s/status/.%s.ring" % (self.path, self.request["host"])
        return self._status(".copied").get("step", 0) if os.path.exists(ring) else None

    def _blame(self):
        """Return why the last failed attempt failed, if whoever ended it has recorded that."""
        lines = read("%s/status/%s.blames.jsonl" % (self.path, self.request["host"])).splitlines()
        return parse_object(lines[-1]) if lines else None

    def _guard(self):
        """Return the guard's last note to this host, if the run has a guard.

        It also says whether the guard has died on this machine since.
        """
        said = self._status(".guard")
        found = {key: value for key, value in said.items() if key not in UNSENT}
        if has_died_here(found):
            found["died"] = True
        return found or None

    def names(self):
        """Return the runs on this host other than the requested one, newest first."""
        plans = glob.glob("runs/*/plan.json") if self.request.get("run") else []
        try:
            plans.sort(key=os.path.getmtime, reverse=True)
        except OSError:  # one is just being deleted
            pass
        return [os.path.basename(os.path.dirname(path)) for path in plans[:20]]

    def _find(self):
        """Find the run to follow, if this host has it; else the newest live run, else the newest."""
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
        """Return the runs of this host: alive, creation time, path, version of the plan file, plan and node."""
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
        """Return the other live runs on this host."""
        locks = glob.glob("runs/*/status/%s.lock" % glob.escape(self.request["host"]))
        names = {lock.split("/")[1] for lock in locks} - {os.path.basename(self.path)}
        return sorted(name for name in names if self._held("runs/" + name))

    def _lock(self, path):
        return "%s/status/%s.lock" % (path, self.request["host"])

    def _held(self, path):
        """Return whether the node runner (or its guardian) holds the run's lock here."""
        try:
            handle = os.open(self._lock(path), os.O_RDWR)
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
        """Return metrics added since the last call."""
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
        """Return the newest step whose checkpoint is complete; None: there is none."""
        root = self.plan.get("checkpoint_dir") or self.path + "/checkpoints"
        try:
            names = sorted(filter(STEP_DIR.match, os.listdir(root)), reverse=True)
        except OSError:
            return None
        return next((int(name[5:]) for name in names if os.path.exists("%s/%s/manifest.json" % (root, name))), None)


def unsaved(saves, attempt):
    """Return why the newest save failed; "" if it did not, or this attempt has not saved yet."""
    if not saves or saves[-1]["kind"] == "saved" or saves[-1].get("attempt") != attempt:
        return ""
    return "step %s: %s" % (saves[-1].get("step"), str(saves[-1].get("detail"))[:300])


def overdue(saves, now, beat):
    """Return a clause if a save or the next checkpoint is overdue; "" if neither is.

    A save is overdue after three times its usual time, a checkpoint when it is late by two intervals.

    ``beat``: rank 0's heartbeat: since when a save is due or running, and the configured time between saves.
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
    """Return where and why the user's command after a save fails in this attempt; "" if it does not."""
    told = [event for event in events if event.get("kind") in AFTER_SAVES and event.get("attempt") == attempt]
    return str(told[-1].get("detail"))[:300] if told and told[-1]["kind"] == AFTER_SAVES[1] else ""


def usual_s(saves):
    """Return the median seconds of past saves, keyed by the phase in which training waits for a save.

    Of two medians, the upper one.
    """
    took_s = [event.get("took_s") for event in saves if event["kind"] == "saved"]
    took_s = sorted(each for each in took_s if isinstance(each, (int, float)) and 0 < each < MOST_SAVE_S)
    return {"checkpoint": took_s[len(took_s) // 2]} if took_s else {}
