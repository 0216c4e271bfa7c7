"""Every file under ``runs/<run>/``, and who writes it: the contract between the trainer and the operator's tools.

Every file has one writer. ``HOST`` is a name of the hosts file, ``N`` a rank::

    plan.json                        launch        what runs where (``plan.Plan``)
    config.toml                      rank 0        the configuration as resolved
    metrics.jsonl                    rank 0        a ``Metrics`` for each step
    model/HOST/                      that host's first rank   the model's small files, as rank 0 sent them
    heartbeat/rank-N.json            rank N        ``Heartbeat``
    status/HOST.json                 node runner   ``NodeStatus`` of that host
    status/HOST.ends.jsonl           node runner   the ``NodeStatus`` with which each attempt ended
    status/HOST.lock                 node runner   held (flock) while that host's node runner lives
    status/HOST.start.lock           agent         held while it starts the run on that host
    status/HOST.stop                 agent         who asked for the end, and the grace
    status/.HOST.secrets             agent         until the node runner has read it
    logs/HOST/torchrun.log           node runner   the words of torchrun itself
    logs/HOST/times                  node runner   when which part of each log arrived
    logs/HOST/ID_*/attempt_*/N/*.log torchrun      stdout.log and stderr.log of each local rank
    checkpoints/step-<8 digits>/     all ranks     complete once it has manifest.json
    events/WRITER.jsonl              that writer   a ``RunEvent`` a line: rank-0, and on the operator's machine guard
    requests/ID.json                 agent         a ``RunRequest``, on the head
    diagnosis/WHAT-rank-N-step-S.*   rank N        profiles, memory and stacks that were asked for
    guard.json, guard.log            guard         ``GuardState``, and what it did, for people (on the operator's machine)

A run that is a Slurm job has these too::

    slurm.json                       launch        which job it is
    request.json                     launch        what the nodes make the plan from
    job.sh                           launch        what every node starts
    slurm-<job>.log                  Slurm         what the nodes print
    status/.slurm.secrets            launch        until every node has its own
    status/HOST.where                that node     its addresses and resources
"""

import dataclasses
from pathlib import Path

UMASK = 0o077  # a run's files are its owner's alone


class _Below:
    """A path inside the run's directory, by its name there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunDir", _: type["RunDir"]) -> Path:
        return run.path / self.name


@dataclasses.dataclass(frozen=True, slots=True)
class RunDir:
    """Paths inside one run's directory."""

    path: Path

    plan = _Below("plan.json")
    config = _Below("config.toml")
    metrics = _Below("metrics.jsonl")
    checkpoints = _Below("checkpoints")  # unless the configuration says otherwise
    requests = _Below("requests")
    guard = _Below("guard.json")
    guard_log = _Below("guard.log")
    job = _Below("slurm.json")
    job_request = _Below("request.json")
    job_script = _Below("job.sh")
    job_secrets = _Below("status/.slurm.secrets")

    @classmethod
    def here(cls, name: str) -> "RunDir":
        """A run of this working directory."""
        return cls(Path("runs") / name)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    def model(self, host: str) -> Path:
        """The model's configuration and tokenizer; written by that host's first rank."""
        return self.path / "model" / host

    def heartbeat(self, rank: int) -> Path:
        """Written by that rank."""
        return self.path / "heartbeat" / f"rank-{rank}.json"

    def events(self, writer: str) -> Path:
        """Written by that writer: rank-0 or guard."""
        return self.path / "events" / f"{writer}.jsonl"

    def diagnosis(self, what: str, rank: int, step: int, suffix: str) -> Path:
        """Written by that rank, when somebody asks for it."""
        return self.path / "diagnosis" / f"{what}-rank-{rank}-step-{step}.{suffix}"

    def status(self, host: str) -> Path:
        """Written by that host's node runner."""
        return self.path / "status" / f"{host}.json"

    def ends(self, host: str) -> Path:
        """How every attempt ended on that host, a line each; written by its node runner."""
        return self.path / "status" / f"{host}.ends.jsonl"

    def lock(self, host: str) -> Path:
        """Held by that host's node runner while it lives."""
        return self.path / "status" / f"{host}.lock"

    def start_lock(self, host: str) -> Path:
        """Held by the agent that starts the run there."""
        return self.path / "status" / f"{host}.start.lock"

    def stop(self, host: str) -> Path:
        """Who asked for the run to be stopped there, and the grace; a new launch deletes it."""
        return self.path / "status" / f"{host}.stop"

    def secrets(self, host: str) -> Path:
        """Where the secrets wait, for the moment between the agent and the node runner."""
        return self.path / "status" / f".{host}.secrets"

    def logs(self, host: str) -> Path:
        """Torchrun's log directory on that host."""
        return self.path / "logs" / host

    def agent_log(self, host: str) -> Path:
        """What torchrun itself says; the node runner points its output there."""
        return self.logs(host) / "torchrun.log"

    def times(self, host: str) -> Path:
        """When the parts of the logs arrived; written by the node runner."""
        return self.logs(host) / "times"

    def where(self, host: str) -> Path:
        """Addresses and resources of a node of a job; written by that node."""
        return self.path / "status" / f"{host}.where"
