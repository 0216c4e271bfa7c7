"""The state of a cluster, folded from the hosts' frames and links. Pure: every moment is given, none is read."""

import collections
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llama405b_tools.machine import gpus
from llama405b_tools.run import judge
from llama405b_tools.text.clean import clean
from llama405b_tools.top.state import frames, picture, verdicts
from llama405b_tools.top.state.hostview import HostView, Odd
from llama405b_tools.top.state.picture import Event, HostRow, Picture, Training

KEPT_METRICS, KEPT_EVENTS = 5000, 500
RECENT_STEPS = 20  # of which the median is taken
LONG_SILENCE = 5  # times the silence of a hang: then log lines excuse nothing
STAY_S = 60.0  # with a run that died, for its guard to bring it back
MOVING = ("TRAIN", "CKPT", "EVAL")
RUN_TROUBLE = (picture.FAILED, picture.HUNG, "no rank has moved")  # what events say of a run, not of its host
Run = Mapping[str, Any]  # what a host says of the run
Runs = Mapping[str, Run]  # by host


class Cluster:
    """Takes what arrives; ``picture`` says what it means."""

    def __init__(self, hosts: Sequence[str], interval_s: float, *, hang_after_s: float = 60.0, badge: str = "") -> None:
        self.hosts = {name: HostView(name) for name in hosts}
        self.interval_s, self.hang_after_s, self.badge = interval_s, hang_after_s, badge
        self.run = ""
        self.created = 0.0
        self.metrics_of: dict[str, collections.deque[Mapping[str, Any]]] = collections.defaultdict(
            lambda: collections.deque(maxlen=KEPT_METRICS)
        )
        self.hung: tuple[str, int, float] | None = None  # the heartbeat that is a hang
        self.load: tuple[float, int] | None = None  # when it was first seen, and how far it was then
        self.standing: dict[tuple[str, str], tuple[str, str]] = {}  # (host, kind) -> key, text: what is wrong now
        self.events: collections.deque[Event] = collections.deque(maxlen=KEPT_EVENTS)
        self.alive_at = 0.0  # when the run that is shown was last seen alive
        self.guard = ""
        self.wanted = ""  # the run that was asked for

    @property
    def metrics(self) -> collections.deque[Mapping[str, Any]]:
        """Of the run that is shown, oldest first."""
        return self.metrics_of[self.run]

    def note(self, text: str, now: float) -> None:
        """Something that happened here, at the operator's."""
        self._event(now, "", "warning", text)

    def link(self, host: str, state: str, why: str, now: float) -> None:
        """A connection was made (OK), or was not: AUTH, REFUSED, TIMEOUT or DOWN, and why."""
        known = self.hosts[host]
        self._say(host, "link", "bad", "" if state == picture.OK else f"{state}: {why}", now)
        known.link, known.why = state if state in picture.SEVERITY else picture.DOWN, clean(why)
        known.linked_at = now if state == picture.OK else None

    def take(self, host: str, arrived: object, now: float) -> None:
        """A frame arrived."""
        frame, wrong = frames.read(arrived)
        if frame is None:
            self.link(host, picture.DOWN, f"its sampler sends what cannot be read ({wrong})", now)
            return
        self._say(host, "link", "note", "", now)
        known = self.hosts[host]
        for words in known.take(frame, now):
            self._event(now, host, "bad", words)
        if run := frame["run"]:
            metrics = self.metrics_of[run["name"]]
            for each in run.get("metrics", ()):
                while metrics and metrics[-1]["step"] >= each["step"]:  # a resumed run goes back
                    metrics.pop()
                metrics.append(each)

    def _choose(self, now: float) -> None:
        """The run to show: the one before while it lives, and a minute longer, and while no other does; else the newest that lives."""
        told = [run for host in self.hosts.values() if host.frame and (run := host.frame["run"])]
        if not told:
            return
        ours = [run for run in told if run["name"] == self.run]
        lives = any(run["alive"] for run in ours)
        self.alive_at = now if lives else self.alive_at
        waits = 2 * len(ours) > len(told) and now < self.alive_at + STAY_S
        stays = ours and (lives or waits or not any(run["alive"] for run in told))
        best = max(ours if stays else told, key=lambda run: (run["alive"], run["created"]))
        if self.run and best["name"] != self.run:
            self._event(now, "", "note", f"now run {best['name']}, before it {self.run}")
            self.standing = {key: said for key, said in self.standing.items() if not said[1].startswith(RUN_TROUBLE)}
        if best["name"] == self.run and best["created"] > self.created and best["attempt"] > 1:
            self._event(now, "", "note", f"{best['name']}: attempt {best['attempt']} began")
        if (best["name"], best["created"]) != (self.run, self.created):
            self.load = None
        self.run, self.created = best["name"], best["created"]

    def picture(self, now: float) -> Picture:
        """What all of it means at this moment; events are noted as a side effect."""
        self._choose(now)
        fresh = [host for host in self.hosts.values() if host.is_fresh(now, self.interval_s)]
        heard = {host.name: run for host in fresh if (run := host.run(self.run))}
        odd = _odd([self.hosts[name] for name in heard] or fresh)
        slow = verdicts.slow_ranks({name: run["beats"] for name, run in heard.items()}, self._median("step_s"))
        hang, failures = self._hang(heard, now), _failures(heard)
        stall = ""
        if not hang and not failures:
            self._say("", "stall", "warning", stall := self._stall(heard, now), now)
        trouble = {failure.host: (picture.FAILED, failure.what) for failure in failures}
        trouble |= {hang.host: (picture.HUNG, hang.words)} if hang else {}
        rows = []
        for host in self.hosts.values():
            state, why = host.state(trouble.get(host.name), now, self.interval_s)
            rows.append(host.row(self.run, state, why, odd, slow.get(host.name, ()), now))
            self._tell(rows[-1], now)
        training = self._training(heard, hang, failures, now)
        verdict, why, code = verdicts.verdict(rows, training, hang, failures, stall)
        if self.wanted and not training and code < 3 and verdict != "CONNECTING":
            verdict, why, code = "DOWN", f"no host knows a run {self.wanted!r}", 3
        return Picture(
            time=now,
            interval_s=self.interval_s,
            badge=self.badge,
            verdict=verdict,
            why=why,
            exit_code=code,
            hosts=tuple(rows),
            training=training,
            events=tuple(self.events),
            fresh=len(fresh),
            gpus_seen=_distinct(fresh, lambda host: len(host.gpus)),
            gpus_expected=_distinct(self.hosts.values(), lambda host: host.expected_gpus),
            workdirs=tuple(sorted({host.frame["cwd"] for host in fresh if host.frame and "cwd" in host.frame})),
        )

    def first_rank(self, host: str) -> int:
        """Of a host; 0 where it is not known."""
        return next((int(first) for name, first, _ in self._nodes() if name == host), 0)

    def log_source(self) -> tuple[tuple[str, int] | None, dict[str, int]]:
        """The run and attempt whose logs are to be read, and the first rank of each host that can be asked for them."""
        found = self._runs()
        if not found or not self._nodes():
            return None, {}
        attempt = max(int(run["attempt"]) for run in found.values())
        return (self.run, attempt), {name: self.first_rank(name) for name in found}

    def _runs(self) -> dict[str, Run]:
        """What each host that knows the run said of it last."""
        return {name: run for name, host in self.hosts.items() if (run := host.run(self.run))}

    def _nodes(self) -> Sequence[Sequence[Any]]:
        """The run's hosts: name, first rank, ranks; () where nobody told yet."""
        return next((plan.nodes for host in self.hosts.values() if (plan := host.plans.get(self.run))), ())

    def _hang(self, heard: Runs, now: float) -> verdicts.Hang | None:
        """The rank that the others wait for, where that is a hang."""
        beats, log_ages = {}, []
        for name, run in heard.items():
            host = self.hosts[name]
            if run["alive"]:
                beats[name] = [(beat, host.clock(now) - beat["time"]) for beat in run["beats"]]
            if run["log_age_s"] is not None and host.heard_at is not None:
                log_ages.append(run["log_age_s"] + now - host.heard_at)
        limit_s = max(self.hang_after_s, verdicts.HANG_STEPS * (self._median("step_s") or 0.0))
        found = judge.silent_rank(beats, limit_s, math.inf)
        if found is None:
            self.hung = None
            return None
        name, beat, age_s = found
        this = (name, int(beat["rank"]), float(beat["time"]))
        sure = this == self.hung or age_s > LONG_SILENCE * limit_s
        words = verdicts.hang_words(beat, age_s, self.hosts[name].gpus, log_ages, sure=sure)
        self.hung = this if words else None
        unheard = self._unheard(heard)
        if words and unheard:  # it may only wait for them
            why = unheard[0].state(None, now, self.interval_s)[1]
            return verdicts.Hang(
                unheard[0].name, age_s, f"{why or 'it does not tell of the run'}; {name} waits: {words}"
            )
        return verdicts.Hang(name, age_s, words) if words else None

    def _unheard(self, heard: Runs) -> list[HostView]:
        """The run's hosts of which nothing fresh is known."""
        return [self.hosts[node] for node, _, _ in self._nodes() if node in self.hosts and node not in heard]

    def _stall(self, heard: Runs, now: float) -> str:
        """That no rank has moved for much longer than a step takes: what may become a hang, and may not."""
        step_s = self._median("step_s")
        beats = [
            (beat, self.hosts[name].clock(now)) for name, run in heard.items() if run["alive"] for beat in run["beats"]
        ]
        if not step_s or not beats or any(beat["phase"] != "train" for beat, _ in beats):
            return ""
        age_s = min(host_now - beat["time"] for beat, host_now in beats)
        if age_s < max(verdicts.STALL_S, verdicts.STALL_STEPS * step_s):
            return ""
        return f"no rank has moved for {age_s:.0f} s, where a step takes {step_s:.1f} s"

    def _median(self, key: str) -> float | None:
        """Of the last steps."""
        recent = itertools.islice(reversed(self.metrics), RECENT_STEPS)
        values = [float(metrics[key]) for metrics in recent if metrics.get(key) is not None]
        return statistics.median(values) if values else None

    def _training(
        self, heard: Runs, hang: verdicts.Hang | None, failures: Sequence[judge.Failure], now: float
    ) -> Training | None:
        found, ours = self._runs(), [self.hosts[name] for name in heard]
        if not found:
            return None
        phase, phase_s = self._phase(heard, hang, failures) if heard else ("UNKNOWN", None)
        head: Mapping[str, Any] = next((run for run in found.values() if "max_steps" in run), {})
        world = sum(ranks for _, _, ranks in self._nodes())
        last = self.metrics[-1] if self.metrics else {}
        step, steps, saved = last.get("step"), head.get("max_steps") or None, head.get("checkpoint_step")
        if phase == "DONE" and step is not None and steps and step < steps:
            phase = "STOPPED"
        step_s, tokens_per_s = self._median("step_s"), self._median("tokens_per_s") if phase in MOVING else None
        lost = None if step is None else max(0, step - (saved or 0))
        done, total, eta_s = self._loading(heard, now) if phase == "LOADING" else (None, None, None)
        if phase != "LOADING":
            self.load = None
        if phase in MOVING and steps and step is not None and step_s:
            eta_s = (steps - step) * step_s
        return Training(
            run=self.run,
            phase=phase,
            phase_s=phase_s,
            world=world,
            attempt=max(run["attempt"] for run in found.values()),
            step=step,
            steps=steps,
            loss=last.get("loss"),
            losses=tuple(float(metrics["loss"]) for metrics in self.metrics),
            step_s=step_s,
            data_s=self._median("data_s"),
            forward_s=self._median("forward_s"),
            backward_s=self._median("backward_s"),
            optimizer_s=self._median("optimizer_s"),
            tokens_per_s=tokens_per_s,
            mfu_pct=_mfu_pct(tokens_per_s, last.get("flops_per_token"), ours, world),
            eta_s=eta_s,
            done_bytes=done,
            total_bytes=total,
            checkpoint_step=saved,
            lost_steps=lost,
            lost_rank_hours=lost * step_s * world / 3600 if lost is not None and step_s else None,
            network=_network(ours, self.run),
            guard=self.guard,
            others=tuple(sorted({name for run in heard.values() for name in run.get("others", ())} - {self.run})),
        )

    def _loading(self, heard: Runs, now: float) -> tuple[int | None, int | None, float | None]:
        """Bytes that all ranks have, those that they will have, and seconds until then at the rate so far."""
        beats = [beat for run in heard.values() for beat in run["beats"]]
        done, total = sum(beat["done_bytes"] for beat in beats), sum(beat["total_bytes"] for beat in beats)
        if not total:
            return None, None, None
        began, had = self.load = self.load or (now, done)
        return done, total, (total - done) * (now - began) / (done - had) if done > had else None

    def _phase(
        self, heard: Runs, hang: verdicts.Hang | None, failures: Sequence[judge.Failure]
    ) -> tuple[str, float | None]:
        """The run's phase, and for how long it is in it."""
        if hang:
            return "HUNG", hang.age_s
        if failures:
            return "FAILED", None
        if not any(run["alive"] for run in heard.values()):
            if self._unheard(heard):
                return "UNKNOWN", None
            if not any(run["status"] for run in heard.values()):
                return "STARTING", None
            stopped = any((run["status"] or {}).get("state") == "stopped" for run in heard.values())
            return ("STOPPED" if stopped else "DONE"), None
        frames_of = {name: self.hosts[name].frame for name in heard}
        beats = [(frame["now"], beat) for name, frame in frames_of.items() if frame for beat in heard[name]["beats"]]
        since = min((host_now - beat["phase_since"] for host_now, beat in beats), default=None)
        return verdicts.phase_of([beat["phase"] for _, beat in beats]), since

    def _tell(self, row: HostRow, now: float) -> None:
        """Note what is new about a host."""
        severity, notes = picture.SEVERITY[row.state], "; ".join(row.notes)
        level = "bad" if severity == 2 else "warning"
        by_link = row.state in (picture.AUTH, picture.REFUSED, picture.TIMEOUT, picture.DOWN)  # said as it happened
        self._say(row.name, "state", level, f"{row.state}: {row.why}" if severity and not by_link else "", now)
        self._say(row.name, "notes", "warning", notes, now)

    def _say(self, host: str, kind: str, level: str, text: str, now: float) -> None:
        """Something is wrong ("": not any more): an event where that is new, and not for numbers that change."""
        before, key = self.standing.get((host, kind)), "".join(letter for letter in text if not letter.isdigit())
        if not text:
            if before:
                del self.standing[host, kind]
                self._event(now, host, "note", f"no longer: {before[1]}")
            return
        if before is None or before[0] != key:
            self._event(now, host, level, text)
        self.standing[host, kind] = key, text

    def _event(self, now: float, host: str, level: str, text: str) -> None:
        self.events.append(Event(now, host, level, clean(text).replace("\n", " ")))


def _failures(heard: Runs) -> list[judge.Failure]:
    """By the node runners' word; else by that of ranks which failed, and will be ended in a moment."""
    described = ((name, {**run, "leftovers": []}) for name, run in heard.items() if run["status"])
    found = [failure for name, run in described if (failure := judge.failure_of(name, run))]
    for name, beat in ((name, beat) for name, run in heard.items() if run["alive"] for beat in run["beats"]):
        if beat["phase"] == "failed":
            why = clean(beat.get("message", ""))
            found.append(
                judge.Failure(name, f"rank {beat['rank']} failed{f': {why}' if why else ''}", judge.origin_of(why))
            )
    return found


def _odd(hosts: Sequence[HostView]) -> Odd:
    """The GPUs that stood out in the frame before too: frames of a moment are up to an interval apart."""
    now = verdicts.odd_gpus({host.name: host.gpus for host in hosts})
    before = verdicts.odd_gpus({host.name: host.gpus_before or host.gpus for host in hosts})
    return {gpu: words for gpu, words in now.items() if gpu in before}


def _mfu_pct(
    tokens_per_s: float | None, flops_per_token: float | None, ours: Sequence[HostView], world: int
) -> float | None:
    """Model FLOPs utilization: those of the model over the most that the GPUs could do, all of one kind."""
    peaks = {gpus.bf16_flops(gpu.name) for host in ours for gpu in host.gpus}
    peak = peaks.pop() if len(peaks) == 1 else None
    if not (tokens_per_s and flops_per_token and peak and world):
        return None
    return 100 * tokens_per_s * flops_per_token / (peak * world)


def _network(ours: Sequence[HostView], run_name: str) -> str:
    """What the training's collectives use: "IB 8x400", "SOCKET"; "" where it is not known."""
    said = {str(run["net"]) for host in ours if (run := host.run(run_name)) and run["net"]}
    if "SOCKET" in said:
        return "SOCKET"
    plans = (host.plans.get(run_name) for host in ours)
    named = next((plan.nccl.get("NCCL_IB_HCA", "") for plan in plans if plan), "")
    if said or named:
        kind, frame = min(said, default="IB"), ours[0].frame
        ports = [port for port in (frame["ib"] if frame else ()) if "ACTIVE" in port["state"]]
        rates = [
            port["rate"].split()[0] for port in ports if port["rate"].strip() and (not named or port["device"] in named)
        ]
        return f"{kind} {len(rates)}x{rates[0]}" if rates else kind
    without = [not host.gpus and host.frame and host.frame["pci_gpus"] is not None for host in ours]
    return "gloo" if without and all(without) else ""


def _distinct(hosts: Iterable[HostView], count: Callable[[HostView], int]) -> int:
    """Summed over machines: two names of the hosts file may be one machine."""
    machines: dict[str, int] = {}
    for host in hosts:
        if host.frame:
            machines[host.frame["machine"]] = max(machines.get(host.frame["machine"], 0), count(host))
    return sum(machines.values())
