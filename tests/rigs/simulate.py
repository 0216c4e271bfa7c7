"""Simulate an incident on a cluster, as frames like the sampler's, for the tests and the recording that `--replay demo` plays. Pure.

The screen is marked SIMULATED. N hosts with eight H100s each train; one GPU is slowed by heat, a rank hangs, and the
guard restarts the run from its checkpoint. nvidia-smi's fields are in its own format.
"""

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from llama405b.contract.reader import Json

FIELDS = (  # of the sampler's query, in its order
    "index", "uuid", "name", "pci.bus_id", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw",
    "power.limit", "clocks.sm", "ecc.errors.uncorrected.volatile.total", "driver_version",
    "clocks_event_reasons.active",
)  # fmt: skip
RUN = "llama-405b"
GPUS, STEP_S, STEPS, SAVE_EVERY = 8, 6.0, 5000, 10
PLANNED_S, BUSY_S, SAVE_S = 5.8, 5.1, 12.0  # a step as predicted; what each rank computes in it; a save
SICK_GPU = 5  # of the rank that hangs
TOKENS_PER_GPU_S = 141  # what FSDP alone reaches with Llama 405B on H100s
FLOPS_PER_TOKEN = 2_473_221_685_248  # of Llama 3.1 405B at 4,096 tokens
BEGIN = 1_795_000_000.0  # seconds since the epoch
LOADED, HOT, COOLED, HUNG, ENDED, RESTARTED, RELOADED = (
    24.0,
    60.0,
    110.0,
    150.0,
    250.0,
    262.0,
    282.0,
)  # seconds from BEGIN
WATCHDOG_WARNED = HUNG + 40  # NCCL's watchdog warns
FIRST_STEP = 1180
LENGTH_S = 340.0
LOGS = "r-1-0_x/attempt_0"
ENTRIES = (  # log lines of the sick host: when, file, text
    (LOADED - 2, "stdout.log", "attention: flash-attn 2; activation checkpointing: True; cpu offload: False"),
    (
        WATCHDOG_WARNED,
        "stderr.log",
        "[rank21]: Watchdog: collective _ALLGATHER_BASE has run for 40 s, timeout is 600 s",
    ),
)
Event = dict[str, Json]


class _SimulatedPhase(NamedTuple):
    """What all hosts do during one phase of the incident."""

    phase: str
    power: float  # share of a GPU's limit
    clock_mhz: int
    utilization: int
    process: str  # state of a rank's process
    busy: float  # share of the CPU
    flow: float  # bytes per second through a port, in each direction


LOADING = _SimulatedPhase("load", 0.17, 345, 0, "S", 0.3, 6e9)
TRAINING = _SimulatedPhase("train", 0.96, 1980, 100, "R", 0.09, 24e9)
HANGING = _SimulatedPhase("train", 0.19, 345, 100, "S", 0.03, 0.0)
EXITED = _SimulatedPhase("train", 0.17, 345, 0, "S", 0.03, 0.0)


class IncidentScript(NamedTuple):
    """The times of the incident's events, in seconds from BEGIN."""

    hot: float
    cooled: float
    hung: float
    ended: float
    restarted: float
    reloaded: float

    def stage(self, t: float) -> _SimulatedPhase:
        """Return what all hosts do at a moment."""
        ends = (
            (LOADED, LOADING),
            (self.hung, TRAINING),
            (self.ended, HANGING),
            (self.restarted, EXITED),
            (self.reloaded, LOADING),
        )
        return next((stage for end, stage in ends if t < end), TRAINING)

    def loaded(self, t: float) -> float:
        """Return the share of its weights that each rank has."""
        for begin, end in ((0.0, LOADED), (self.restarted, self.reloaded)):
            if begin <= t < end:
                return (t - begin) / (end - begin)
        return 1.0

    def step(self, t: float) -> int:
        """Return the last completed step."""
        if t < self.restarted:
            return FIRST_STEP + max(0, int((min(t, self.hung) - LOADED) / STEP_S))
        saved_step = self.step(self.hung) // SAVE_EVERY * SAVE_EVERY
        return saved_step + max(0, int((t - self.reloaded) / STEP_S))


INCIDENT = IncidentScript(HOT, COOLED, HUNG, ENDED, RESTARTED, RELOADED)
CALM = IncidentScript(*[math.inf] * 6)  # nothing happens


def host_names(n_hosts: int) -> list[str]:
    """Return the hosts' names."""
    return [f"gpu-{i:0{len(str(n_hosts))}d}" for i in range(1, n_hosts + 1)]


def sick_host(hosts: Sequence[str]) -> str:
    """Return the host whose GPU gets hot, and whose rank hangs."""
    return hosts[min(2, len(hosts) - 1)]


def simulate_incident(
    n_hosts: int = 8, interval_s: float = 2.0, seconds: float = LENGTH_S, script: IncidentScript = INCIDENT
) -> Iterator[Event]:
    """Yield events in order of time: ``{"t", "host", "frame"}`` and ``{"t", "host", "entries"}``."""
    hosts = host_names(n_hosts)
    sims = [_SimulatedHost(i, host, hosts, script) for i, host in enumerate(hosts)]
    t, logged_step = 0.0, FIRST_STEP
    while t < seconds:
        step = script.step(t)
        for sim in sims:
            moment = BEGIN + t + 0.1 * sim.i / n_hosts
            yield {"t": moment, "host": sim.name, "frame": sim.frame(t, interval_s)}
            if step > logged_step:
                yield {"t": moment, "host": sim.name, "entries": sim.log_lines(step, t)}
        logged_step = step
        for begin, file, text in ENTRIES if script is INCIDENT else ENTRIES[:1]:
            if begin <= t < begin + interval_s:
                host = next(sim.name for sim in sims if sim.is_sick)
                yield {"t": BEGIN + t + 0.2, "host": host, "entries": [[BEGIN + t, f"{LOGS}/5/{file}", text]]}
        t += interval_s


class _SimulatedHost:
    def __init__(self, i: int, name: str, hosts: Sequence[str], script: IncidentScript) -> None:
        self.i, self.name, self.hosts, self.script = i, name, hosts, script
        self.is_sick = name == sick_host(hosts)
        self.random = random.Random(i)
        self.ib = self.busy = self.total = 0
        self.sent_plan, self.sent_metrics = 0, FIRST_STEP - 121  # attempt, step

    def frame(self, t: float, interval_s: float) -> dict[str, Json]:
        stage = self.script.stage(t)
        self.total += int(100 * interval_s * 224)
        self.busy += int(100 * interval_s * 224 * stage.busy)
        self.ib += int(interval_s * stage.flow)
        run = self._run(t, stage)
        return {
            "machine": self.name,
            "pci_gpus": GPUS,
            "cpu": {"total": self.total, "idle": self.total - self.busy, "cores": 224, "load": ["12.0"]},
            "memory": {"total": 2 << 40, "available": (2 << 40) - (310 << 30), "oom_kills": 0},
            "disks": [[".", 3 << 40, 7 << 40]],
            "net": {"eth0": [int(t * 3e5), int(t * 2e5)]},
            "ib": [self._port(port) for port in range(8)],
            "kernel": [],
            "run": run,
            "smi": {
                "text": "".join(self._gpu(gpu, t, stage) for gpu in range(GPUS)),
                "fields": list(FIELDS),
                "apps": "".join(f"{self._pid(gpu)}, GPU-{self.i:02d}{gpu}, 70112\n" for gpu in range(GPUS)),
                "hung_s": 0.0,
                "age_s": 0.2,
                "took_s": 0.4,
            },
            "now": BEGIN + t,
            "procs": [self._process(gpu, t, stage) for gpu in range(GPUS)],
        }

    def _process(self, gpu: int, t: float, stage: _SimulatedPhase) -> list[Json]:
        rank, command = str(self.i * GPUS + gpu), "python -m llama405b.train"
        return [self._pid(gpu), stage.process, int(t * 100), 9 << 30, rank, command]

    def _port(self, port: int) -> dict[str, Json]:
        counters = {"port_rcv_data": self.ib // 4, "port_xmit_data": self.ib // 4, "symbol_error": 0}
        rate = "400 Gb/sec (4X NDR)"
        return {"device": f"mlx5_{port}", "port": "1", "state": "4: ACTIVE", "rate": rate, "counters": counters}

    def _pid(self, gpu: int) -> int:
        return 41_000 + 100 * gpu

    def _gpu(self, gpu: int, t: float, stage: _SimulatedPhase) -> str:
        power, clock, heat, slowed = stage.power, stage.clock_mhz, 34 + 35 * stage.power, 0
        if self.is_sick and gpu == 3 and self.script.hot <= t < self.script.cooled:
            power, clock, heat, slowed = 0.55, 1185, heat + 19, 0x40
        power_w = 700 * power + self.random.uniform(-8, 8)
        heat += self.random.uniform(-2, 2)
        values = [
            gpu, f"GPU-{self.i:02d}{gpu}", "NVIDIA H100 80GB HBM3", f"00000000:{0x1B + gpu:02X}:00.0", stage.utilization,
            70_112, 81_559, f"{heat:.0f}", f"{power_w:.2f}", "700.00", clock, 0, "570.124.06", f"0x{slowed:016x}",
        ]  # fmt: skip
        return ", ".join(str(value) for value in values) + "\n"

    def _run(self, t: float, stage: _SimulatedPhase) -> dict[str, Json]:
        step, attempt, created = self.script.step(t), 1, BEGIN - 60
        if t >= self.script.restarted:
            attempt, created = 2, BEGIN + self.script.restarted - 4
        status: dict[str, Json] = {
            "host": self.name,
            "state": "running",
            "attempt": attempt,
            "pid": 40_000,
            "pid_start": 1,
            "cause": None,
        }
        if stage is EXITED:
            status |= {"state": "stopped", "cause": {"kind": "stopped", "by": "the guard"}}
        run: dict[str, Json] = {
            "name": RUN,
            "created": created,
            "attempt": attempt,
            "alive": stage is not EXITED,
            "status": status,
            "beats": self._beats(t, stage),
            "log_age_s": self._log_age_s(t),
            "net": "IB",
            "checkpoint_step": step // SAVE_EVERY * SAVE_EVERY,
            "guard": self._guard(t),
        }
        if t >= self.script.ended:
            run["blame"] = {"attempt": 1, "host": sick_host(self.hosts), "cause": self._cause()}
        if self.sent_plan != attempt:
            self.sent_plan = attempt
            run["nodes"] = [[name, i * GPUS, GPUS] for i, name in enumerate(self.hosts)]
            run["expected_step_s"] = PLANNED_S
            run["mesh"] = {"dp_shard": len(self.hosts) * GPUS}
            run["nccl"] = {"NCCL_IB_HCA": ",".join(f"mlx5_{port}" for port in range(8))}
        if self.i == 0:
            new_steps = range(self.sent_metrics + 1, step + 1)
            run["metrics"] = [
                self._metrics(new_step, attempt, BEGIN + t - STEP_S * (step - new_step)) for new_step in new_steps
            ]
            self.sent_metrics = max(self.sent_metrics, step)
            run["max_steps"] = STEPS
            run["usual_s"] = {"checkpoint": SAVE_S}
        return run

    def _guard(self, t: float) -> dict[str, Json]:
        is_recovering = self.script.ended <= t < self.script.restarted
        guard: dict[str, Json] = {
            "run": RUN,
            "pid": 4711,
            "pid_start": 1,
            "machine": "ops",
            "limit": 5,
            "time": BEGIN + t,
        }
        return guard | {"state": "recovering" if is_recovering else "watching"}

    def _cause(self) -> dict[str, Json]:
        rank, age_s = GPUS * self.hosts.index(sick_host(self.hosts)) + SICK_GPU, self.script.ended - self.script.hung
        step = self.script.step(self.script.hung) - 1
        return {
            "kind": "hung",
            "host": sick_host(self.hosts),
            "rank": rank,
            "phase": "train",
            "step": step,
            "age_s": age_s,
        }

    def _log_age_s(self, t: float) -> float:
        """Return the age of its last line: of a step, or of the hung rank's watchdog."""
        if not self.script.hung <= t < self.script.restarted:
            return 0.5
        last = LOADED + (self.script.step(t) - FIRST_STEP) * STEP_S
        if self.is_sick and t >= WATCHDOG_WARNED:
            last = WATCHDOG_WARNED
        return round(t - last, 1)

    def _beats(self, t: float, stage: _SimulatedPhase) -> list[dict[str, Json]]:
        if stage is EXITED:
            return []
        script, step, total = self.script, self.script.step(t), 812_000_000_000 // (GPUS * len(self.hosts))
        phase_begin = max(moment for moment in (0.0, LOADED, script.restarted, script.reloaded) if moment <= t)
        is_hanging, moved_at, done_bytes = stage is HANGING, t, int(total * script.loaded(t))
        if stage is TRAINING:
            moved_at = max(phase_begin, t - (t - phase_begin) % STEP_S)
        elif is_hanging:
            moved_at = script.hung
        return [
            {
                "rank": self.i * GPUS + gpu,
                "host": self.name,
                "pid": self._pid(gpu),
                "time": BEGIN + moved_at - (0.4 if gpu else 0.2),
                "step": step - int(is_hanging and self.is_sick and gpu == SICK_GPU),
                "phase": stage.phase,
                "phase_since": BEGIN + phase_begin,
                "done_bytes": done_bytes,
                "total_bytes": total,
                "state": "S",
                "data_s": 0.03,
                "optimizer_s": 0.6,
                "busy_s": round(BUSY_S + 0.02 * math.sin(step * 7.3 + 8 * self.i + gpu), 3),
            }
            for gpu in range(GPUS)
        ]

    def _loss(self, step: int) -> float:
        return 1.62 + 2.1 * math.exp(-step / 900) + math.sin(step * 12.9898) * 0.02

    def _metrics(self, step: int, attempt: int, time: float) -> dict[str, Json]:
        return {
            "step": step,
            "time": time,
            "attempt": attempt,
            "loss": self._loss(step),
            "step_s": STEP_S,
            "data_s": 0.03,
            "forward_s": 1.51,
            "backward_s": 3.86,
            "optimizer_s": 0.6,
            "tokens_per_s": TOKENS_PER_GPU_S * GPUS * len(self.hosts),
            "flops_per_token": FLOPS_PER_TOKEN,
        }

    def log_lines(self, step: int, t: float) -> list[list[Json]]:
        """Return what this host's ranks print at a step."""
        if self.i:
            return []
        rate = TOKENS_PER_GPU_S * GPUS * len(self.hosts)
        text = f"step {step}/{STEPS}  loss {self._loss(step):.4f}  grad 0.412  lr 1.20e-05  {rate:,.0f} tokens/s  {STEP_S:.2f} s"
        lines = [text]
        if step % SAVE_EVERY == 0:
            lines.append(f"saved /shared/llama-405b/step-{step:08d}")
        return [[BEGIN + t, f"{LOGS}/0/stdout.log", line] for line in lines]


def write_recording(path: Path, n_hosts: int = 8) -> None:
    """Record the incident, as ``--record`` does."""
    from llama405b.contract import reader
    from llama405b_tools.top.event_sources import Recorder, RecordingHeader, ReplaySource, SourceEvent

    events = (reader.build_record(SourceEvent, event, "event") for event in simulate_incident(n_hosts))
    source = ReplaySource(RecordingHeader(1, tuple(host_names(n_hosts)), 2.0), events, "SIMULATED")
    recorder = Recorder(path, source)
    for event in source.remaining_events():
        recorder.write(event)
    recorder.close()


if __name__ == "__main__":
    from llama405b_tools.top.event_sources import DEMO_RECORDING

    DEMO_RECORDING.unlink(missing_ok=True)
    write_recording(DEMO_RECORDING)
