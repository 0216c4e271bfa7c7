"""Every file under ``runs/<run>/``, and who writes it: the contract between the trainer and the operator's tools.

Every file has one writer. ``HOST`` is a name from the hosts file, ``N`` a rank::

    plan.json                        launch        what runs where (``plan.Plan``)
    config.toml                      rank 0        the configuration as resolved
    metrics.jsonl                    rank 0        one ``Metrics`` per step, and before them perhaps ``EvaluationMetrics``
    samples.jsonl                    rank 0        one ``Sample`` per prompt and evaluation
    sequences.jsonl                  rank 0        one ``SequencePreview`` for each of the first sequences
    blamed.jsonl, skip.jsonl         rank 0        what `blame` measured of each document, and a list of those that it blames
    spent.json                       rank 0        ``SpentHours`` of all attempts
    model/HOST/                      that host's first rank   the model's small files, as rank 0 sent them
    heartbeat/rank-N.json            rank N        ``Heartbeat``
    status/HOST.json                 node runner   ``NodeStatus`` of that host
    status/HOST.ends.jsonl           node runner   the last ``NodeStatus`` of each attempt
    status/HOST.blames.jsonl         agent         one ``Blame`` per failed attempt: why, as whoever ended it decided
    status/HOST.lock                 node runner   held (flock) while that host's node runner is running
    status/HOST.start.lock           agent         held while it starts the run on that host
    status/.turn                     agent         held while it checks that nobody else runs it, under any host name
    status/HOST.stop                 agent         who asked the run to stop, and the grace period
    status/HOST.guard                agent         ``GuardState`` of the requested guard, as last received by that host
    status/.HOST.secrets             agent         until the node runner has read it
    status/.HOST.guard-order         agent         until the guard that begins on that host has read it
    status/.HOST.spot                replicator    where that host receives copies of checkpoints (``checkpoints.Endpoint``)
    status/.HOST.ring                that host's first rank   which host is next (``checkpoints.Ring``)
    status/HOST.after-save           that directory's owner   for which checkpoints ``checkpoint.after_save`` has succeeded
    status/HOST.copied               replicator    what the next host has (``checkpoints.CopiedStep``)
    logs/HOST/torchrun.log           node runner   torchrun's own output
    logs/HOST/times                  node runner   when each part of each log arrived
    logs/HOST/ID_*/attempt_*/N/*.log torchrun      stdout.log and stderr.log of each local rank (the node runner covers secrets)
    checkpoints/step-<8 digits>/     all ranks     complete once it has manifest.json
    checkpoints/of-HOST/step-<8 digits>/   replicator   copies of the part of the host before, with ``storage = local``
    checkpoints/for-export/step-<8 digits>/   export   files that it has gathered, until the model is written
    checkpoints/lease-<8 digits>.json   rank 0     who may write there (``checkpoints.Lease``); the highest number counts
    events/WRITER.jsonl              that writer   one ``RunEvent`` per line: rank-0, copies-HOST, and guard (on its machine)
    requests/ID.json                 agent         a ``RunRequest``, on the head
    flight/rank-N.pipe               NCCL          any byte written there makes it write what its flight recorder has
    flight/rank-N                    NCCL          the last collectives of rank N, pickled by torch: at a timeout, or when asked
    diagnosis/WHAT-rank-N-step-S.*   rank N        profiles, memory and stacks, on request
    autopsy/TIME/                    autopsy, guard  ``report.txt``, ``stacks.txt`` and what each HOST saw (on the machine that asked)
    black-box/TIME-VERDICT.gz        cluster-top    the ten minutes around an incident, for --replay (on the machine where it ran)
    report.html                      report        what `llama405b report` showed last (on the machine that asked)
    tracking/NAME.json               tracker       what was sent to it (``tracking.feed.Sent``), next to its own files
    tracking/NAME.lock               tracker       held (flock) while it sends
    guard.json, guard.log            guard         ``GuardState``, and a log for people (on the machine where it runs)

A run that is a Slurm job also has these::

    slurm.json                       launch        which job it is
    request.json                     launch        the nodes' input for making the plan
    job.sh                           launch        the script that every node starts
    slurm-<job>.log                  Slurm         the nodes' output
    status/.slurm.secrets            launch        until every node has its own copy
    status/HOST.where                that node     its addresses and resources
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

EXPORT_RECORD = ".llama405b-export.json"  # in a directory that export has written
UMASK = 0o077  # a run's files are private to their owner


class _RunPath:
    """A path inside the run's directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run_dir: "RunDir", _: type["RunDir"]) -> Path:
        return run_dir.path / self.name


class _NamedRunPath:
    """A path inside the run's directory that contains the name of a host, rank or writer."""

    def __init__(self, template: str) -> None:
        self.template = template

    def __get__(self, run_dir: "RunDir", _: type["RunDir"]) -> Callable[[str | int], Path]:
        return lambda name: run_dir.path / self.template.format(name)


@dataclasses.dataclass(frozen=True, slots=True)
class RunDir:
    """Paths inside one run's directory."""

    path: Path

    plan = _RunPath("plan.json")
    config = _RunPath("config.toml")
    metrics = _RunPath("metrics.jsonl")
    checkpoints = _RunPath("checkpoints")  # unless the configuration says otherwise
    requests = _RunPath("requests")
    spot = _NamedRunPath("status/.{}.spot")
    ring = _NamedRunPath("status/.{}.ring")
    copied = _NamedRunPath("status/{}.copied")
    after_save = _NamedRunPath("status/{}.after-save")
    model = _NamedRunPath("model/{}")
    heartbeat = _NamedRunPath("heartbeat/rank-{}.json")
    events = _NamedRunPath("events/{}.jsonl")
    status = _NamedRunPath("status/{}.json")
    ends = _NamedRunPath("status/{}.ends.jsonl")
    blames = _NamedRunPath("status/{}.blames.jsonl")
    lock = _NamedRunPath("status/{}.lock")
    start_lock = _NamedRunPath("status/{}.start.lock")
    turn = _RunPath("status/.turn")
    stop = _NamedRunPath("status/{}.stop")  # a new launch deletes it
    guarded = _NamedRunPath("status/{}.guard")  # a launch without a guard, and a stop, delete it
    secrets = _NamedRunPath("status/.{}.secrets")
    logs = _NamedRunPath("logs/{}")
    agent_log = _NamedRunPath("logs/{}/torchrun.log")
    times = _NamedRunPath("logs/{}/times")
    samples = _RunPath("samples.jsonl")
    sequences = _RunPath("sequences.jsonl")
    blamed = _RunPath("blamed.jsonl")
    skips = _RunPath("skip.jsonl")
    spent = _RunPath("spent.json")
    tracking = _RunPath("tracking")
    tracking_lock = _NamedRunPath("tracking/{}.lock")
    sent = _NamedRunPath("tracking/{}.json")
    flight = _NamedRunPath("flight/rank-{}")  # torch adds .pipe
    autopsies = _RunPath("autopsy")
    black_box = _RunPath("black-box")
    report = _RunPath("report.html")
    guard = _RunPath("guard.json")
    guard_log = _RunPath("guard.log")
    job = _RunPath("slurm.json")
    job_request = _RunPath("request.json")
    job_script = _RunPath("job.sh")
    job_secrets = _RunPath("status/.slurm.secrets")
    where = _NamedRunPath("status/{}.where")

    @classmethod
    def from_name(cls, name: str) -> "RunDir":
        """Return the run of this name in the working directory."""
        return cls(Path("runs") / name)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    def diagnosis(self, kind: str, rank: int, step: int, suffix: str) -> Path:
        """Return the path of a diagnosis that a rank writes on request."""
        return self.path / "diagnosis" / f"{kind}-rank-{rank}-step-{step}.{suffix}"
