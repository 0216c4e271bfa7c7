"""What cluster-top shows of a host, as it changes: the machine, as the sampler reads it, and the run that is followed."""

import contextlib
import dataclasses
import glob
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llama405b.contract import reader
from llama405b.contract.checkpoints import step_of
from llama405b.contract.files import read_record, read_records
from llama405b.contract.paths import RunDir
from llama405b.contract.records import FailureRecord, GuardState, NodeState, NodeStatus
from llama405b.spec.plan import NO_PLAN, Node, Plan, read_plan
from llama405b_tools.agent import sampler
from llama405b_tools.agent.describe import (
    SaveState,
    first_launch_time,
    newest_checkpoint,
    read_copied,
    read_heartbeats,
    read_save_state,
)
from llama405b_tools.agent.messages import RankHeartbeat, RunFrame, StepMetrics, WatchRequest
from llama405b_tools.agent.processes import is_alive, is_run_active, read_guard_note, resolve_run_dir
from llama405b_tools.agent.streaming import FileFollower, parse_new_lines

MAX_NAMES = 20  # runs that are listed if the one asked for is not here
FIRST_METRICS_BYTES = 256 << 10  # of the file that are read at first, and at once
NCCL_SEARCH_BYTES = 1 << 20
NETWORKS = (
    (b"NET/IB : Using [", "IB"),
    (b"NET/OFI Selected", "EFA"),
    (b"NET/Socket : Using [", "SOCKET"),
)  # NCCL's words
NO_RUN = RunDir(Path())
PlanVersion = tuple[int, int]  # modification time and inode of the plan's file


def watch(request: WatchRequest) -> None:
    """Print a frame of this host and its run every few seconds, until standard input closes or stays silent."""
    machine: Any = RemoteMachine(request.host)
    if not request.elsewhere:
        machine = sampler.Machine(sampler.Smi(request.smi_retry_s))  # type: ignore[no-untyped-call]
    options = dataclasses.asdict(request) | {"workdir": str(Path.cwd())}
    sampler.run_until_silent(options, machine, WatchedRun(request))  # type: ignore[no-untyped-call]


class RemoteMachine:
    """A host whose files are on this machine but which is another machine."""

    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, is_slow: bool) -> None:
        """Do nothing: the host cannot be queried."""

    def frame(self) -> dict[str, Any]:
        """Return its part of a frame."""
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

    def slow_frame(self, run: "WatchedRun") -> dict[str, Any]:  # noqa: ARG002
        """Return the costlier part of a frame: no process is on this machine."""
        return {"procs": []}

    def end(self) -> None:
        """Do nothing: nothing was started."""


class WatchedRun:
    """The run that is followed on this host: the one asked for, else the newest live one, else the newest."""

    def __init__(self, request: WatchRequest) -> None:
        self.request, self.followed = request, request.stay
        self.partial_input = b""  # after the last complete line
        self.plans: dict[str, tuple[PlanVersion, Plan]] = {}  # by run
        self.other_runs: list[str] = []  # names of the other runs that are alive here
        self._follow(NO_RUN, NO_PLAN)

    def _follow(self, run: RunDir, plan: Plan) -> None:
        """Begin anew with a run, or with a new attempt of it."""
        self.run, self.plan = run, plan
        self.node = plan.find_node(self.request.host)
        self.metrics = FileFollower(run.metrics, max_bytes=FIRST_METRICS_BYTES)
        with contextlib.suppress(OSError):  # a long run's file is not read from its beginning
            info = run.metrics.stat()
            self.metrics.set_position(run.metrics, (info.st_ino, max(0, info.st_size - FIRST_METRICS_BYTES - 1)))
        self.is_plan_sent = False
        self.save_state = SaveState()
        self.logs: list[Path] = []
        self.network = ""  # that NCCL says it uses
        self.guard: GuardState | None = None  # what the run's guard last told this host
        self.saved_step: int | None = None  # of the newest checkpoint
        self.heartbeats: tuple[RankHeartbeat, ...] = ()
        self.status: NodeStatus | None = None

    def read_input(self, data: bytes) -> None:
        """Read input from the operator: lines of JSON that name the run to follow; empty lines are keepalives."""
        *lines, self.partial_input = (self.partial_input + data).split(b"\n")
        for line in filter(None, lines):
            self.followed = json.loads(line)["stay"]

    @property
    def marker(self) -> str:
        """What marks the run's processes; '' without a run."""
        return f"{self.run.path}:{self.request.host}" if self.node else ""

    @property
    def disk_paths(self) -> list[str]:
        """Directories on the disks that it writes to, besides the working directory."""
        return list(filter(None, [self.plan.checkpoint_dir]))

    def pids(self) -> set[int]:
        """Return the processes that its files name while it is alive: of another user's, the marker cannot be read."""
        if not self._is_alive():
            return set()
        return {beat.pid for beat in self.heartbeats} | ({self.status.pid} if self.status else set())

    def list_names(self) -> list[str]:
        """Return the runs on this host other than the requested one, newest first."""
        names = sorted(self.plans, key=lambda name: self.plans[name][0], reverse=True) if self.request.run else []
        return names[:MAX_NAMES]

    def frame(self, is_slow: bool) -> RunFrame | None:
        """Return everything that changed, and the ranks' present state; None without a run."""
        is_new = self._choose()
        run, plan, node, host = self.run, self.plan, self.node, self.request.host
        if node is None:
            return None
        is_head = node.first_rank == 0
        self.status = read_record(NodeStatus, run.status(host))
        alive = self._is_alive()
        self.heartbeats = tuple(
            beat.with_state("?") if self.request.elsewhere else beat for beat in read_heartbeats(run, node)
        )
        if is_slow or is_new:
            self._find_logs()
            self.guard = read_guard_note(run, host)
            if is_head:
                first_beat = next((beat for beat in self.heartbeats if alive and beat.rank == 0), None)
                self.save_state = read_save_state(run, plan.attempt, first_beat)
        if is_slow or is_new or is_head:  # often by one host alone: all others read the same directory
            checkpoint = newest_checkpoint(run, plan)
            self.saved_step = step_of(checkpoint) if checkpoint else None
        copied = read_copied(run, host)
        frame = RunFrame(
            name=run.name,
            created=plan.created,
            attempt=plan.attempt,
            alive=alive,
            status=self.status,
            beats=self.heartbeats,
            log_age_s=self._log_age_s(),
            net=self.network,
            blame=next(iter(read_records(FailureRecord, run.blames(host), 1)), None),
            guard=self.guard and dataclasses.replace(self.guard, command="", directory="", message="", cause=None),
            others=tuple(self.other_runs),
            checkpoint_step=self.saved_step,
            copied_step=copied.step if copied else None,
            run_created=first_launch_time(run, host) or None,
        )
        if is_head:
            frame = self._with_progress(frame)
        return frame if self.is_plan_sent else self._with_plan(frame, node)

    def _with_progress(self, frame: RunFrame) -> RunFrame:
        """Return the frame with what only rank 0's host knows."""
        try:
            settings = self.run.config.read_text(encoding="utf-8", errors="replace")
        except OSError:
            settings = ""
        max_steps = re.search(r"^max_steps = (\d+)", settings, re.MULTILINE)
        return dataclasses.replace(
            frame,
            metrics=tuple(parse_new_lines(StepMetrics, self.metrics)),
            max_steps=int(max_steps[1]) if max_steps else None,
            unsaved=self.save_state.failure,
            unsent=self.save_state.after_save_failure,
            usual_s={"checkpoint": self.save_state.usual_s} if self.save_state.usual_s else {},
        )

    def _with_plan(self, frame: RunFrame, node: Node) -> RunFrame:
        """Return the frame with what is sent once for each plan."""
        plan, self.is_plan_sent = self.plan, True
        return dataclasses.replace(
            frame,
            nodes=tuple((other.name, other.first_rank, other.slots) for other in plan.nodes),
            trains=plan.trains,
            nccl={name: value for name, value in node.env.items() if name.startswith("NCCL_")},
            expected_step_s=plan.expected.step_s,
            load_s=plan.load_s,
            mesh=plan.mesh,
        )

    def _choose(self) -> bool:
        """Find the run to follow; return whether it or its plan is new."""
        previous = self.plans
        self.plans = dict(self._list_plans())
        host = self.request.host
        here = {name: plan for name, (_, plan) in self.plans.items() if plan.find_node(host)}
        alive_names = {name for name in here if is_alive(resolve_run_dir(name), host)}
        names = [name for name in here if self.request.run in (None, name)]
        if not names:
            self._follow(NO_RUN, NO_PLAN)
            return False
        chosen = max(names, key=lambda name: (name == self.followed, name in alive_names, here[name].created))
        self.other_runs = sorted(alive_names - {chosen})
        run = resolve_run_dir(chosen)
        if self.run.path == run.path and previous.get(chosen) == self.plans[chosen]:
            return False
        metrics = self.metrics if self.run.path == run.path else None
        self._follow(run, here[chosen])
        self.metrics = metrics or self.metrics  # an attempt goes on in the same file
        return True

    def _list_plans(self) -> Iterator[tuple[str, tuple[PlanVersion, Plan]]]:
        """Yield the plan of every run; one that has not changed is not read again."""
        for file in Path("runs").glob("*/plan.json"):
            try:
                info = file.stat()
            except OSError:  # it is just being deleted
                continue
            version, name = (info.st_mtime_ns, info.st_ino), file.parent.name
            known_version, plan = self.plans.get(name, (None, NO_PLAN))
            yield name, (version, plan if version == known_version else read_plan(resolve_run_dir(name)))

    def _is_alive(self) -> bool:
        """Return whether the run is alive here; of a Slurm job, whose locks are held on its nodes, by its status alone."""
        if self.plan.slurm_job:
            return self.status is not None and self.status.state in (NodeState.STARTING, NodeState.RUNNING)
        return is_run_active(self.run, self.request.host, self.plan)

    def _find_logs(self) -> None:
        """Find this attempt's log files, and the network that NCCL says it uses."""
        launch = f"{glob.escape(self.plan.rdzv_id)}*"
        self.logs = list(self.run.logs(self.request.host).glob(f"{launch}/attempt_*/*/*.log"))
        for path in self.logs:
            if self.network:
                return
            try:
                with path.open("rb") as file:
                    text = file.read(NCCL_SEARCH_BYTES)
            except OSError:
                continue
            self.network = next((name for words, name in NETWORKS if words in text), "")

    def _log_age_s(self) -> float | None:
        mtimes = []
        for path in self.logs:
            try:
                info = path.stat()
            except OSError:
                continue
            if info.st_size:
                mtimes.append(info.st_mtime)
        return round(time.time() - max(mtimes), 1) if mtimes else None

    @staticmethod
    def dumps(frame: Mapping[str, Any]) -> str:
        """Return a frame as a line of JSON."""
        return reader.dumps(frame)
