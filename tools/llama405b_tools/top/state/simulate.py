"""An incident of a cluster that does not exist: frames as the sampler would send them, for the demo and the tests. Pure.

SIMULATED, and said so on screen: N hosts of eight H100 train, one GPU is slowed by heat, a rank hangs, the guard restarts
the run from its checkpoint. nvidia-smi's fields are in its own form.
"""

import math
import random
from collections.abc import Iterator, Sequence

from llama405b.contract.reader import Json

FIELDS = (  # of the sampler's question, in its order
    "index", "uuid", "name", "pci.bus_id", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw",
    "power.limit", "clocks.sm", "ecc.errors.uncorrected.volatile.total", "driver_version",
    "clocks_event_reasons.active",
)  # fmt: skip
GPUS, STEP_S, STEPS, SAVE_EVERY = 8, 6.0, 5000, 10
TOKENS_PER_GPU_S = 141  # what FSDP alone reaches with Llama 405B on H100s
FLOPS_PER_TOKEN = 2_473_221_685_248  # of Llama 3.1 405B at 4,096 tokens
BEGIN = 1_795_000_000.0  # seconds since the epoch
LOADED, HOT, COOLED, HUNG, ENDED, AGAIN, RELOADED = (
    24.0,
    60.0,
    110.0,
    150.0,
    250.0,
    262.0,
    282.0,
)  # seconds from the beginning
WARNED = HUNG + 40  # by NCCL's watchdog
FIRST_STEP = 1180
LENGTH_S = 340.0
Event = dict[str, Json]


def names(n_hosts: int) -> list[str]:
    """The hosts."""
    return [f"gpu-{i:0{len(str(n_hosts))}d}" for i in range(1, n_hosts + 1)]


def incident(n_hosts: int = 8, interval_s: float = 2.0, seconds: float = LENGTH_S) -> Iterator[Event]:
    """Events in order of time: ``{"t", "host", "frame"}`` and ``{"t", "host", "entries"}``."""
    hosts = names(n_hosts)
    sims = [_Host(i, host, hosts) for i, host in enumerate(hosts)]
    t, said = 0.0, 0
    while t < seconds:
        step = _step(t)
        for sim in sims:
            moment = BEGIN + t + 0.1 * sim.i / n_hosts
            yield {"t": moment, "host": sim.name, "frame": sim.frame(t, interval_s)}
            if step > said and _phase(t) == "train":
                yield {"t": moment, "host": sim.name, "entries": sim.log_lines(step, t)}
        said = step
        for begin, lines in ENTRIES:
            if begin <= t < begin + interval_s:
                host = hosts[_sick(n_hosts)]
                yield {
                    "t": BEGIN + t + 0.2,
                    "host": host,
                    "entries": [[BEGIN + t, f"r-1-0_x/attempt_0/5/{file}", text] for file, text in lines],
                }
        t += interval_s


ENTRIES: Sequence[tuple[float, Sequence[tuple[str, str]]]] = (
    (LOADED - 2, [("stdout.log", "attention: flash-attn 2; activation checkpointing: True; cpu offload: False")]),
    (
        WARNED,
        [("stderr.log", "[rank21]: Watchdog: collective _ALLGATHER_BASE has run for 40 s, timeout is 600 s")],
    ),
)


def _sick(n_hosts: int) -> int:
    return min(2, n_hosts - 1)


def _phase(t: float) -> str:
    if t < LOADED or AGAIN <= t < RELOADED:
        return "load"
    return "train"


def _step(t: float) -> int:
    """The last step that was done."""
    if t < LOADED:
        return FIRST_STEP
    if t < AGAIN:
        return FIRST_STEP + int((min(t, HUNG) - LOADED) / STEP_S)
    saved = (FIRST_STEP + int((HUNG - LOADED) / STEP_S)) // SAVE_EVERY * SAVE_EVERY
    return saved + max(0, int((t - RELOADED) / STEP_S))


class _Host:
    def __init__(self, i: int, name: str, hosts: Sequence[str]) -> None:
        self.i, self.name, self.hosts = i, name, hosts
        self.sick = i == _sick(len(hosts))
        self.random = random.Random(i)
        self.ib = self.busy = self.total = 0
        self.sent_plan = self.sent_metrics = 0

    def frame(self, t: float, interval_s: float) -> dict[str, Json]:
        phase, hangs, gone = _phase(t), HUNG <= t < ENDED, ENDED <= t < AGAIN
        works = phase == "train" and not hangs and not gone
        share = 0.19 if hangs else 0.17
        if works:
            share = 0.96
        self.total += int(100 * interval_s * 224)
        busy, flow = (0.3, 6e9) if phase == "load" else (0.03, 0.0)
        if works:
            busy, flow = 0.09, 24e9
        self.busy += int(100 * interval_s * 224 * busy)
        self.ib += int(interval_s * flow)
        run = self._run(t, phase, gone)
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
                "text": "".join(self._gpu(gpu, t, share) for gpu in range(GPUS)),
                "fields": list(FIELDS),
                "apps": "".join(f"{self._pid(gpu)}, GPU-{self.i:02d}{gpu}, 70112\n" for gpu in range(GPUS)),
                "hung_s": 0.0,
                "age_s": 0.2,
                "took_s": 0.4,
            },
            "now": BEGIN + t,
            "procs": [
                [
                    self._pid(gpu),
                    "R" if works else "S",
                    int(t * 100),
                    9 << 30,
                    str(self.i * GPUS + gpu),
                    "python -m llama405b.train",
                ]
                for gpu in range(GPUS)
            ],
        }

    def _port(self, port: int) -> dict[str, Json]:
        counters = {"port_rcv_data": self.ib // 4, "port_xmit_data": self.ib // 4, "symbol_error": 0}
        rate = "400 Gb/sec (4X NDR)"
        return {"device": f"mlx5_{port}", "port": "1", "state": "4: ACTIVE", "rate": rate, "counters": counters}

    def _pid(self, gpu: int) -> int:
        return 41_000 + 100 * gpu

    def _gpu(self, gpu: int, t: float, share: float) -> str:
        hot = self.sick and gpu == 3 and HOT <= t < COOLED
        power = 700 * (0.55 if hot and share > 0.5 else share) + self.random.uniform(-8, 8)
        heat = 34 + 35 * share + self.random.uniform(-2, 2) + (19 if hot else 0)
        clock = 1980 if share > 0.5 else 345
        if hot:
            clock = 1185
        used, util = 70_112, 100 if share > 0.18 else 0
        values = [
            gpu, f"GPU-{self.i:02d}{gpu}", "NVIDIA H100 80GB HBM3", f"00000000:{0x1B + gpu:02X}:00.0", util, used, 81_559,
            f"{heat:.0f}", f"{power:.2f}", "700.00", clock, 0, "570.124.06",
            "0x0000000000000040" if hot else "0x0000000000000000",
        ]  # fmt: skip
        return ", ".join(str(value) for value in values) + "\n"

    def _run(self, t: float, phase: str, gone: bool) -> dict[str, Json]:
        step, attempt = _step(t), 1 if t < AGAIN else 2
        run: dict[str, Json] = {
            "name": "llama-405b",
            "created": BEGIN - 60 if attempt == 1 else BEGIN + AGAIN - 4,
            "attempt": attempt,
            "alive": not gone,
            "status": {
                "host": self.name,
                "state": "stopped" if gone else "running",
                "attempt": attempt,
                "pid": 40_000,
                "pid_start": 1,
                "cause": {"kind": "stopped", "by": "the guard"} if gone else None,
            },
            "stopped_by": "",
            "beats": [] if gone else self._beats(t, phase),
            "log_age_s": self._log_age_s(t),
            "net": "IB",
        }
        if self.sent_plan != attempt:
            self.sent_plan = attempt
            run["nodes"] = [[name, i * GPUS, GPUS] for i, name in enumerate(self.hosts)]
            run["nccl"] = {"NCCL_IB_HCA": ",".join(f"mlx5_{port}" for port in range(8))}
        if self.i == 0:
            first = self.sent_metrics + 1 if self.sent_metrics else FIRST_STEP - 120
            if step < self.sent_metrics:
                first = step + 1
            run["metrics"] = (
                [self._metrics(each) for each in range(first, step + 1)]
                if phase == "train" or not self.sent_metrics
                else []
            )
            self.sent_metrics = step if run["metrics"] or not self.sent_metrics else self.sent_metrics
            run["checkpoint_step"] = (FIRST_STEP if t < LOADED else step) // SAVE_EVERY * SAVE_EVERY
            run["max_steps"] = STEPS
        return run

    def _log_age_s(self, t: float) -> float:
        """Since its last line: of a step, or of the watchdog of the rank that hangs."""
        if not HUNG <= t < AGAIN:
            return 0.5
        last_step = LOADED + (_step(t) - FIRST_STEP) * STEP_S
        return round(t - (WARNED if self.sick and t >= WARNED else last_step), 1)

    def _beats(self, t: float, phase: str) -> list[dict[str, Json]]:
        step, total = _step(t), 812_000_000_000 // (GPUS * len(self.hosts))
        since = max(moment for moment in (0.0, LOADED, AGAIN, RELOADED) if moment <= t)
        moved = min(t, HUNG) if t < AGAIN else t
        behind = self.sick and HUNG <= t < AGAIN
        takes = LOADED if t < LOADED else RELOADED - AGAIN
        share = min(1.0, (t - since) / takes) if phase == "load" else 1.0
        return [
            {
                "rank": self.i * GPUS + gpu,
                "host": self.name,
                "pid": self._pid(gpu),
                "time": BEGIN + moved - (0.4 if gpu else 0.2),
                "step": step - (1 if behind and gpu == 5 else 0),
                "phase": phase,
                "phase_since": BEGIN + since,
                "done_bytes": int(total * share),
                "total_bytes": total,
                "state": "S",
                "data_s": 0.03,
                "optimizer_s": 0.6,
            }
            for gpu in range(GPUS)
        ]

    def _metrics(self, step: int) -> dict[str, Json]:
        noise = math.sin(step * 12.9898) * 0.02
        return {
            "step": step,
            "loss": 1.62 + 2.1 * math.exp(-step / 900) + noise,
            "step_s": STEP_S,
            "data_s": 0.03,
            "forward_s": 1.51,
            "backward_s": 3.86,
            "optimizer_s": 0.6,
            "tokens_per_s": TOKENS_PER_GPU_S * GPUS * len(self.hosts),
            "flops_per_token": FLOPS_PER_TOKEN,
        }

    def log_lines(self, step: int, t: float) -> list[list[Json]]:
        """What the ranks of this host print at a step."""
        if self.i:
            return []
        loss = self._metrics(step)["loss"]
        rate = TOKENS_PER_GPU_S * GPUS * len(self.hosts)
        text = f"step {step}/{STEPS}  loss {loss:.4f}  grad 0.412  lr 1.20e-05  {rate:,.0f} tokens/s  {STEP_S:.2f} s"
        lines: list[list[Json]] = [[BEGIN + t, "r-1-0_x/attempt_0/0/stdout.log", text]]
        if step % SAVE_EVERY == 0:
            lines.append([BEGIN + t, "r-1-0_x/attempt_0/0/stdout.log", f"saved /shared/llama-405b/step-{step:08d}"])
        return lines
