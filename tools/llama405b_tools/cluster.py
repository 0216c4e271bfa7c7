"""The state of a cluster, folded from the hosts' frames and links. Pure: every moment is given, none is read.

A host's freshness is judged by the frames that arrive, never by its connection: a frozen peer keeps a connection for long.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from llama405b_tools import frames, gpus, picture, runs, verdicts
from llama405b_tools.clean import clean
from llama405b_tools.fold import fold_numbers
from llama405b_tools.gpus import Gpu
from llama405b_tools.picture import Event, GpuCell, HostRow, Picture, ProcessRow, RankRow, Training

STALE_FRAMES = 3
SMI_HUNG_S = 10.0
HISTORY, KEPT_METRICS, KEPT_EVENTS = 120, 5000, 500
RECENT_STEPS = 20  # of which the median is taken
COUNTERS_S = 600.0  # errors are counted over this time
LINK_WORDS = {"CONNECTING": picture.CONNECTING}
Frame = Mapping[str, Any]
Hang = tuple[str, float, str]  # the host, for how long its rank is silent, and what is said of it


@dataclasses.dataclass(slots=True)
class _Host:
    """What is known of a host."""

    link: str = picture.CONNECTING  # or OK, AUTH, REFUSED, TIMEOUT, DOWN
    why: str = ""
    heard_at: float | None = None
    frame: Frame | None = None
    before: Frame | None = None  # the frame before
    baseline: Frame | None = None  # minutes ago: for counters of errors
    baseline_at: float = 0.0
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    smi_fault: str = ""
    expected_gpus: int = 0  # the most it ever had
    xids: list[str] = dataclasses.field(default_factory=list)
    procs: Sequence[Sequence[Any]] = ()
    procs_before: tuple[float, Mapping[int, int]] | None = None  # host's clock and ticks by pid
    cpu_of: dict[int, float] = dataclasses.field(default_factory=dict)
    nodes: Sequence[Sequence[Any]] = ()
    nccl: Mapping[str, str] = dataclasses.field(default_factory=dict)
    history: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=HISTORY))


class Cluster:
    """Takes what arrives; ``picture`` says what it means."""

    def __init__(self, hosts: Sequence[str], interval_s: float, *, hang_after_s: float = 60.0, badge: str = "") -> None:
        self.hosts = {name: _Host() for name in hosts}
        self.interval_s, self.hang_after_s, self.badge = interval_s, hang_after_s, badge
        self.run = ""
        self.created = 0.0
        self.metrics: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=KEPT_METRICS)
        self.phase, self.phase_at = "", 0.0
        self.load: tuple[float, int] | None = None  # when it was first seen, and how far it was then
        self.standing: dict[tuple[str, str], tuple[str, str]] = {}  # (host, kind) -> level, text: what is wrong now
        self.events: collections.deque[Event] = collections.deque(maxlen=KEPT_EVENTS)
        self.guard = ""

    def link(self, host: str, state: str, why: str, now: float) -> None:
        """A connection was made (OK), or was not: AUTH, REFUSED, TIMEOUT or DOWN, and why."""
        known = self.hosts[host]
        if known.link not in (state, picture.CONNECTING) or state != picture.OK:
            self._say(host, "link", "note" if state == picture.OK else "bad", why if state != picture.OK else "", now)
        known.link, known.why = state if state in picture.SEVERITY else picture.DOWN, clean(why)

    def take(self, host: str, arrived: object, now: float) -> None:
        """A frame arrived."""
        frame, wrong = frames.read(arrived)
        if frame is None:
            self.link(host, picture.DOWN, f"its sampler sends what cannot be read ({wrong})", now)
            return
        known = self.hosts[host]
        known.before, known.frame, known.heard_at = known.frame, frame, now
        known.link, known.why = picture.OK, ""
        self._say(host, "link", "note", "", now)
        if known.baseline is None or now - known.baseline_at > COUNTERS_S:
            known.baseline, known.baseline_at = frame, now
        found, fault = gpus.read({"smi": frame["smi"]["text"], "fields": frame["smi"].get("fields", ())})
        known.gpus, known.smi_fault = found, clean(fault)[:200]
        known.expected_gpus = max(known.expected_gpus, len(found))
        for bus, number, words in gpus.xids(frame["kernel"] or ()):
            known.xids = [*known.xids, f"Xid {number} at {bus}: {words}"][-3:]
            self._event(now, host, "bad", known.xids[-1])
        if "procs" in frame:
            self._take_processes(known, frame)
        if (level := _level(known)) is not None:
            known.history.append(level)
        if frame["run"]:
            self._take_run(known, frame["run"], now)

    def _take_processes(self, known: _Host, frame: Frame) -> None:
        known.procs = frame["procs"] or ()
        ticks = {row[0]: row[2] for row in known.procs}
        if known.procs_before:
            at, old = known.procs_before
            seconds = max(0.1, frame["now"] - at)
            known.cpu_of = {pid: (ticks[pid] - old[pid]) / seconds for pid in ticks if pid in old}  # 100 ticks a second
        known.procs_before = frame["now"], ticks

    def _take_run(self, known: _Host, run: Mapping[str, Any], now: float) -> None:
        if run["name"] != self.run and run["created"] >= self.created:
            self.metrics.clear()
            self.run, self.phase, self.load = run["name"], "", None
        if run["name"] != self.run:
            return
        if run["created"] > self.created:
            if self.created and run["attempt"] > 1:
                self._event(now, "", "note", f"{run['name']}: attempt {run['attempt']} began")
            self.created = run["created"]
        known.nodes, known.nccl = run.get("nodes", known.nodes), run.get("nccl", known.nccl)
        for metrics in run.get("metrics", ()):
            while self.metrics and self.metrics[-1]["step"] >= metrics["step"]:  # a resumed run goes back
                self.metrics.pop()
            self.metrics.append(metrics)

    def picture(self, now: float) -> Picture:
        """What all of it means at this moment; events are noted as a side effect."""
        fresh = {name: known for name, known in self.hosts.items() if self._is_fresh(known, now)}
        ours = {name: known for name, known in fresh.items() if self._run_of(known)}
        odd = verdicts.odd_gpus({name: known.gpus for name, known in (ours or fresh).items()})
        hang = self._hang(ours, now)
        failures = self._failures(ours)
        hosts = tuple(self._row(name, known, odd, hang, failures, now) for name, known in self.hosts.items())
        for row in hosts:
            bad = picture.SEVERITY[row.state]
            self._say(
                row.name, "state", "bad" if bad == 2 else "warning", f"{row.state}: {row.why}" if bad else "", now
            )
            self._say(row.name, "notes", "warning", "; ".join(row.notes), now, key=_numberless("; ".join(row.notes)))
        training = self._training(ours, hang, failures, now)
        verdict, why, code = _verdict(hosts, training, failures)
        return Picture(
            time=now,
            interval_s=self.interval_s,
            badge=self.badge,
            verdict=verdict,
            why=why,
            exit_code=code,
            hosts=hosts,
            training=training,
            events=tuple(self.events),
            fresh=len(fresh),
            gpus_seen=_distinct(fresh.values(), lambda known: len(known.gpus)),
            gpus_expected=_distinct(self.hosts.values(), lambda known: max(known.expected_gpus, _pci(known))),
        )

    def first_rank(self, host: str) -> int:
        """Of a host; 0 where it is not known."""
        nodes = next((known.nodes for known in self.hosts.values() if known.nodes), ())
        return next((int(node[1]) for node in nodes if node[0] == host), 0)

    def log_source(self) -> tuple[tuple[str, int] | None, dict[str, int]]:
        """The run and attempt whose logs are to be read, and the first rank of each host that can be asked for them."""
        found = {name: run for name, known in self.hosts.items() if (run := self._run_of(known))}
        if not found or not any(known.nodes for known in self.hosts.values()):
            return None, {}
        attempt = max(int(run["attempt"]) for run in found.values())
        return (self.run, attempt), {name: self.first_rank(name) for name in found}

    def _is_fresh(self, known: _Host, now: float) -> bool:
        return known.heard_at is not None and now - known.heard_at <= STALE_FRAMES * self.interval_s

    def _run_of(self, known: _Host) -> Mapping[str, Any] | None:
        run = known.frame["run"] if known.frame else None
        return run if run and run["name"] == self.run else None

    def _hang(self, ours: Mapping[str, _Host], now: float) -> Hang | None:
        """The rank that the others wait for, where that is a hang."""
        beats = {}
        for name, known in ours.items():
            run = self._run_of(known)
            if run and run["alive"] and known.frame and known.heard_at is not None:
                host_now = known.frame["now"] + now - known.heard_at
                beats[name] = [(beat, host_now - beat["time"]) for beat in run["beats"]]
        limit_s = max(self.hang_after_s, verdicts.HANG_STEPS * (self._median_step_s() or 0.0))
        found = runs.silent_rank(beats, limit_s, math.inf)
        if found is None:
            return None
        host, beat, age_s = found
        log_ages = [self._log_age_s(known, now) for known in ours.values()]
        words = verdicts.hang_words(beat, age_s, ours[host].gpus, log_ages)
        return (host, age_s, words) if words else None

    def _log_age_s(self, known: _Host, now: float) -> float | None:
        run = self._run_of(known)
        if not run or run["log_age_s"] is None or known.heard_at is None:
            return None
        return float(run["log_age_s"]) + now - known.heard_at

    def _failures(self, ours: Mapping[str, _Host]) -> list[runs.Failure]:
        found = []
        for name, known in ours.items():
            run = self._run_of(known)
            assert run
            described = {"alive": run["alive"], "leftovers": [], "status": run["status"]}
            if run["status"] and (failure := runs.failure_of(name, described)):
                found.append(failure)
        return found

    def _row(
        self,
        name: str,
        known: _Host,
        odd: Mapping[tuple[str, int], str],
        hang: Hang | None,
        failures: Sequence[runs.Failure],
        now: float,
    ) -> HostRow:
        age_s = None if known.heard_at is None else now - known.heard_at
        state, why = self._state(name, known, hang, failures, now)
        frame = known.frame
        if frame is None:
            return HostRow(name, state, why, age_s)
        run = self._run_of(known)
        ranks = tuple(_rank(beat, frame["now"] + (age_s or 0.0)) for beat in (run["beats"] if run else ()))
        cells = tuple(self._cell(known, gpu, name, ranks, odd) for gpu in known.gpus)
        notes = _gpu_notes(cells)
        notes += [*known.xids, *verdicts.host_notes(frame, known.baseline)]
        if known.expected_gpus > len(cells):
            notes.insert(0, f"{known.expected_gpus - len(cells)} of {known.expected_gpus} GPUs are lost")
        if known.smi_fault and cells:
            notes.insert(0, f"nvidia-smi: {known.smi_fault}")
        memory = frame["memory"]
        used = memory["total"] - memory["available"] if None not in (memory["total"], memory["available"]) else None
        return HostRow(
            name=name,
            state=state,
            why=why,
            age_s=age_s,
            gpus=cells,
            has_gpu=None if frame["pci_gpus"] is None else bool(cells or frame["pci_gpus"] or known.expected_gpus),
            ranks=ranks,
            processes=tuple(_process(row, known) for row in known.procs),
            cpu_pct=_cpu_pct(known),
            cores=frame["cpu"]["cores"],
            ram_bytes=memory["total"],
            ram_used_bytes=used,
            disk_free_bytes=min((free for _, free, _ in frame["disks"]), default=None),
            net_bytes_per_s=_rate(known, _net),
            ib_bytes_per_s=_rate(known, _ib),
            notes=tuple(notes),
            history=tuple(known.history),
        )

    def _state(
        self,
        name: str,
        known: _Host,
        hang: Hang | None,
        failures: Sequence[runs.Failure],
        now: float,
    ) -> tuple[str, str]:
        """A host's state, and why."""
        if known.link not in (picture.OK, picture.CONNECTING):
            return known.link, known.why
        if known.frame is None or known.heard_at is None:
            return picture.CONNECTING, "no frame yet"
        if not self._is_fresh(known, now):
            return picture.STALE, f"no frame for {now - known.heard_at:.0f} s"
        if hang and hang[0] == name:
            return picture.HUNG, hang[2]
        if failure := next((failure for failure in failures if failure.host == name), None):
            return picture.FAILED, failure.what
        smi = known.frame["smi"]
        if smi["hung_s"] > SMI_HUNG_S:
            return picture.SMI_HUNG, f"nvidia-smi does not answer for {smi['hung_s']:.0f} s; a GPU or the driver hangs"
        if not known.gpus and (known.smi_fault or known.frame["pci_gpus"]):
            return picture.NO_DRIVER, known.smi_fault or f"{known.frame['pci_gpus']} NVIDIA devices, but no nvidia-smi"
        return picture.OK, ""

    def _cell(
        self, known: _Host, gpu: Gpu, host: str, ranks: Sequence[RankRow], odd: Mapping[tuple[str, int], str]
    ) -> GpuCell:
        by_pid = {rank.pid: rank.rank for rank in ranks}
        apps = _apps(known)
        rank = next((by_pid[pid] for pid, uuid, _ in apps if uuid == gpu.uuid and pid in by_pid), None)
        return GpuCell(
            index=gpu.index,
            name=gpu.name,
            utilization=gpu.utilization,
            power_w=gpu.power_w,
            power_limit_w=gpu.power_limit_w,
            temperature_c=gpu.temperature_c,
            clock_mhz=gpu.clock_mhz,
            used_mib=gpu.used_mib,
            memory_mib=gpu.memory_mib,
            rank=rank,
            odd=odd.get((host, gpu.index), ""),
        )

    def _median_step_s(self) -> float | None:
        recent = [float(metrics["step_s"]) for metrics in list(self.metrics)[-RECENT_STEPS:]]
        return statistics.median(recent) if recent else None

    def _training(
        self,
        ours: Mapping[str, _Host],
        hang: Hang | None,
        failures: Sequence[runs.Failure],
        now: float,
    ) -> Training | None:
        found = {name: run for name, known in self.hosts.items() if (run := self._run_of(known))}
        if not found:
            return None
        phase, since = self._phase(found, hang, failures)
        if phase != self.phase:
            self.phase, self.phase_at = phase, now
        head = next((run for run in found.values() if "max_steps" in run), {})
        nodes: Sequence[Sequence[Any]] = next((known.nodes for known in self.hosts.values() if known.nodes), ())
        world = sum(node[2] for node in nodes)
        beats = [beat for run in found.values() for beat in run["beats"]]
        last = self.metrics[-1] if self.metrics else {}
        step, step_s = last.get("step"), self._median_step_s()
        steps, saved = head.get("max_steps") or None, head.get("checkpoint_step")
        lost = None if step is None else max(0, step - (saved or 0))
        loading = phase == "LOADING" and any(beat["total_bytes"] for beat in beats)
        done, total = (
            (sum(beat[key] for beat in beats) for key in ("done_bytes", "total_bytes")) if loading else (None, None)
        )
        eta_s = (steps - step) * step_s if steps and step is not None and step_s else None
        if loading and done is not None and total is not None:
            began, had = self.load = self.load or (now, done)
            eta_s = (total - done) * (now - began) / (done - had) if done > had else None
        recent = {
            key: _recent(self.metrics, key)
            for key in ("data_s", "forward_s", "backward_s", "optimizer_s", "tokens_per_s")
        }
        return Training(
            run=self.run,
            phase=phase,
            phase_s=since,
            world=world,
            attempt=max(run["attempt"] for run in found.values()),
            step=step,
            steps=steps,
            loss=last.get("loss"),
            losses=tuple(float(metrics["loss"]) for metrics in self.metrics),
            step_s=step_s,
            eta_s=eta_s if phase in ("TRAIN", "CKPT", "EVAL", "LOADING") else None,
            done_bytes=done,
            total_bytes=total,
            checkpoint_step=saved,
            lost_steps=lost,
            lost_rank_hours=lost * step_s * world / 3600 if lost is not None and step_s else None,
            mfu_pct=_mfu_pct(recent["tokens_per_s"], last.get("flops_per_token"), ours, world),
            network=_network(ours),
            guard=self.guard,
            **recent,
        )

    def _phase(
        self,
        found: Mapping[str, Mapping[str, Any]],
        hang: Hang | None,
        failures: Sequence[runs.Failure],
    ) -> tuple[str, float | None]:
        """The run's phase, and for how long it is in it."""
        beats = [beat for run in found.values() for beat in run["beats"]]
        ages = [self._age_of(name, beat["phase_since"]) for name, run in found.items() for beat in run["beats"]]
        since = min((age for age in ages if age is not None), default=None)
        if hang:
            return "HUNG", hang[1]
        if failures:
            return "FAILED", None
        if not any(run["alive"] for run in found.values()):
            stopped = any((run["status"] or {}).get("state") == "stopped" for run in found.values())
            return ("STOPPED" if stopped else "DONE"), None
        return verdicts.phase_of([beat["phase"] for beat in beats]), since

    def _age_of(self, host: str, moment: float) -> float | None:
        frame = self.hosts[host].frame
        return frame["now"] - moment if frame else None

    def _say(self, host: str, kind: str, level: str, text: str, now: float, *, key: str = "") -> None:
        """Something is wrong ("" not any more): an event where that is new."""
        known = self.standing.get((host, kind))
        if not text:
            if known:
                del self.standing[host, kind]
                self._event(now, host, "note", f"no longer: {known[1]}")
            return
        if known is None or known[0] != (key or _numberless(text)):
            self._event(now, host, level, text)
        self.standing[host, kind] = (key or _numberless(text)), text

    def _event(self, now: float, host: str, level: str, text: str) -> None:
        self.events.append(Event(now, host, level, clean(text).replace("\n", " ")))


def _gpu_notes(cells: Sequence[GpuCell]) -> list[str]:
    """What is said of GPUs; those of which the same is said together."""
    said: dict[str, list[int]] = {}
    for gpu in cells:
        if gpu.odd:
            said.setdefault(gpu.odd, []).append(gpu.index)
    return [f"gpu {fold_numbers(indices)}: {words}" for words, indices in said.items()]


def _numberless(text: str) -> str:
    return "".join(letter for letter in text if not letter.isdigit())


def _level(known: _Host) -> float | None:
    """Mean power (else utilization) of a host's GPUs in percent; of its CPU where it has none."""
    shares = [
        100 * gpu.power_w / gpu.power_limit_w for gpu in known.gpus if gpu.power_w is not None and gpu.power_limit_w
    ]
    used = [float(gpu.utilization) for gpu in known.gpus if gpu.utilization is not None]
    found = shares or used
    return statistics.mean(found) if found else None if known.gpus else _cpu_pct(known)


def _cpu_pct(known: _Host) -> float | None:
    if not known.frame or not known.before:
        return None
    new, old = known.frame["cpu"], known.before["cpu"]
    ticks = new["total"] - old["total"]
    return 100 * (1 - (new["idle"] - old["idle"]) / ticks) if ticks > 0 else None


def _rate(known: _Host, bytes_of: Any) -> float | None:
    """Bytes a second between the last two frames."""
    if not known.frame or not known.before:
        return None
    new, old, seconds = bytes_of(known.frame), bytes_of(known.before), known.frame["now"] - known.before["now"]
    rates = [(new[key] - old[key]) / seconds for key in new if key in old] if seconds > 0 else []
    return max(rates) if rates and min(rates) >= 0 else None


def _net(frame: Frame) -> dict[str, int]:
    return {name: sum(counts) for name, counts in frame["net"].items()}


def _ib(frame: Frame) -> dict[str, int]:
    """All ports together; InfiniBand counts words of four bytes (IBA, PortCounters)."""
    counts = [port["counters"] for port in frame["ib"]]
    known = [
        count["port_rcv_data"] + count["port_xmit_data"]
        for count in counts
        if {"port_rcv_data", "port_xmit_data"} <= set(count)
    ]
    return {"all": 4 * sum(known)} if known else {}


def _rank(beat: Mapping[str, Any], host_now: float) -> RankRow:
    return RankRow(
        beat["rank"],
        beat["pid"],
        beat["phase"],
        beat["step"],
        max(0.0, host_now - beat["time"]),
        beat["state"],
        beat["done_bytes"],
        beat["total_bytes"],
    )


def _apps(known: _Host) -> list[tuple[int, str, int | None]]:
    """Processes on GPUs: pid, the GPU's uuid, MiB."""
    found = []
    for line in ((known.frame or {}).get("smi", {}).get("apps") or "").splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and words[0].isdigit():
            found.append((int(words[0]), words[1], int(words[2]) if words[2].isdigit() else None))
    return found


def _process(row: Sequence[Any], known: _Host) -> ProcessRow:
    pid, state, _, rss, rank, command = row
    app = next((entry for entry in _apps(known) if entry[0] == pid), None)
    index = next((gpu.index for gpu in known.gpus if app and gpu.uuid == app[1]), None)
    return ProcessRow(
        pid,
        state,
        known.cpu_of.get(pid),
        rss,
        int(rank) if rank.isdigit() else None,
        index,
        app[2] if app else None,
        clean(command),
    )


def _recent(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [float(entry[key]) for entry in list(metrics)[-RECENT_STEPS:] if entry.get(key) is not None]
    return statistics.median(values) if values else None


def _mfu_pct(
    tokens_per_s: float | None, flops_per_token: float | None, ours: Mapping[str, _Host], world: int
) -> float | None:
    """Model FLOPs utilization: those of the model over the most that the GPUs could do, all of one kind."""
    peaks = {gpus.bf16_flops(gpu.name) for known in ours.values() for gpu in known.gpus}
    peak = peaks.pop() if len(peaks) == 1 else None
    if not (tokens_per_s and flops_per_token and peak and world):
        return None
    return 100 * tokens_per_s * flops_per_token / (peak * world)


def _network(ours: Mapping[str, _Host]) -> str:
    """What the training's collectives use: "IB 8x400", "SOCKET"; "" where it is not known."""
    said = {str(run["net"]) for known in ours.values() if known.frame and (run := known.frame["run"]) and run["net"]}
    if "SOCKET" in said:
        return "SOCKET"
    ports = [
        port
        for known in list(ours.values())[:1]
        if known.frame
        for port in known.frame["ib"]
        if "ACTIVE" in port["state"]
    ]
    named = next((known.nccl.get("NCCL_IB_HCA", "") for known in ours.values()), "")
    used = [port for port in ports if not named or port["device"] in named]
    if said or named:
        rate = used[0]["rate"].split()[0] if used and used[0]["rate"] else ""
        return f"{next(iter(sorted(said)), 'IB')} {len(used)}x{rate}" if rate else next(iter(sorted(said)), "IB")
    without = [not known.gpus and known.frame and known.frame["pci_gpus"] is not None for known in ours.values()]
    return "gloo" if without and all(without) else ""


def _distinct(hosts: Any, count: Any) -> int:
    """Summed over machines: two names of the hosts file may be one machine."""
    machines: dict[str, int] = {}
    for known in hosts:
        if known.frame:
            machines[known.frame["machine"]] = max(machines.get(known.frame["machine"], 0), count(known))
    return sum(machines.values())


def _pci(known: _Host) -> int:
    return int(known.frame["pci_gpus"] or 0) if known.frame else 0


def _verdict(
    hosts: Sequence[HostRow], training: Training | None, failures: Sequence[runs.Failure]
) -> tuple[str, str, int]:
    """The one word, why, and the exit code."""
    if hung := next((row for row in hosts if row.state == picture.HUNG), None):
        return "HUNG", f"{hung.name}: {hung.why}", 3
    if failures:
        worst = runs.first_failure(failures)
        return "DOWN", f"{worst.host}: {worst.what}", 3
    lost = [row for row in hosts if picture.SEVERITY[row.state] == 2]
    if lost:
        return (
            "DOWN",
            f"{lost[0].name}: {lost[0].state} {lost[0].why}" + (f", and {len(lost) - 1} more" if lost[1:] else ""),
            3,
        )
    reasons = [f"{row.name}: {row.state} {row.why}" for row in hosts if picture.SEVERITY[row.state] == 1]
    reasons += [f"{row.name}: {row.notes[0]}" for row in hosts if row.notes]
    if training and training.network == "SOCKET":
        reasons.insert(0, "training runs over TCP sockets")
    if reasons:
        return "DEGRADED", reasons[0] + (f", and {len(reasons) - 1} more" if reasons[1:] else ""), 1
    waiting = [row.name for row in hosts if row.state == picture.CONNECTING]
    return ("CONNECTING", f"waiting for {len(waiting)} hosts", 1) if waiting else ("HEALTHY", "", 0)
