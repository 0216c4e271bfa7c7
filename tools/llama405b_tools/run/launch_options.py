"""The command line of ``launch``, without the settings of the training run."""

import argparse
from pathlib import Path

from llama405b.contract import command, config
from llama405b.contract.command import OneLineParser

EPILOG = """
Settings of the training run are flags, too: see `llama405b train --help`. Any other torchrun program goes after --.

  llama405b launch hosts --config my.toml --rehearse
  llama405b launch hosts --config my.toml --optimizer.lr 2e-5 --restart 5
  llama405b launch hosts -- my_script.py --its-own args

Exit codes: 0 started (with --follow: finished successfully), 1 a host or the run failed, 2 refused, nothing started.
"""


def launch_parser() -> OneLineParser:
    """Return the parser of ``launch``; what it does not know are settings of the trainer."""
    parser = OneLineParser(
        prog="llama405b launch",
        description="Check every host, start torchrun on all of them or on none, and follow or guard the run if asked to.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("hosts", nargs="?", type=Path, default=Path("hosts"), metavar="HOSTS", help="hosts file [hosts]")
    add("--run", default="", help="name of the run [<preset>-<date>-<time>]")
    command.add_config(add, "TOML file of settings; of several the later ones win")
    add("--preset", default="", help=f"settings to start from: {', '.join(config.preset_names())}")
    command.add_resume(add)
    command.add_evaluate_only(add)
    command.add_blame(add)
    add("--rehearse", action="store_true", help="only rehearse the run, with 2 layers: load, step, save, kill, resume")
    add("--follow", action="store_true", help="follow the run to its end; Ctrl-C only stops following")
    add("--plain", action="store_true", help="follow with every step on a line, on a terminal too")
    add("--allow-sockets", action="store_true", help="let NCCL use TCP even though the hosts have RDMA")
    add("--allow-misfit", action="store_true", help="start what `llama405b plan` predicts not to fit")
    add("--port", type=int, default=0, help="rendezvous port on the first host [a free one]")
    add("--dry-run", action="store_true", help="print what would run where, without connecting")
    own = "a Python file with functions of your own: metrics, loss, documents, … (training.extend; docs/extending.md)"
    add("--extend", default="", metavar="FILE", help=own)
    kept = "run CMD for each checkpoint that has landed, beside training, with its path in $LLAMA405B_CHECKPOINT (checkpoint.after_save)"
    add("--after-save", default="", metavar="CMD", help=kept)
    _add_guard(parser.add_argument_group("guard the run"))
    _add_environment(parser.add_argument_group("environment of the ranks"))
    _add_slurm(parser.add_argument_group("Slurm"))
    return parser


def _add_guard(group: argparse._ArgumentGroup) -> None:
    add, again = group.add_argument, "resume it on failure or hang, up to N times without a newer checkpoint [0]"
    add("--restart", type=int, default=0, metavar="N", help=again)
    add(
        "--hang-after",
        default="5m",
        metavar="TIME",
        help="with --restart: end and resume the run when a rank is silent this long; cluster-top shows a hang earlier [5m]",
    )
    fewer = "with --restart: when hosts stay lost, go on with those that are left, MIN or more, and take them back when they are back [1]"
    add("--shrink", type=int, nargs="?", const=1, default=0, metavar="MIN", help=fewer)
    long = "with --shrink: how long a host is lost, or back, before that [5m]"
    add("--shrink-after", default="5m", metavar="TIME", help=long)
    where = "run the guard on this host of the run, so that this machine may be switched off [this machine]"
    add("--guard-on", default="", metavar="HOST", help=where)
    add("--notify", default="", metavar="CMD", help="run CMD on incident, recovery, trouble and end")
    often = "also run it this often while nothing happens, so that silence means that the guard is gone [never]"
    add("--notify-every", default="0", metavar="TIME", help=often)
    most = "money that the run may cost, with --price: it saves and stops before that (training.gpu_hours) [any]"
    add("--budget", type=float, default=0.0, metavar="MONEY", help=most)
    add("--price", type=float, default=0.0, metavar="MONEY", help="of a GPU-hour")
    add(
        "--export",
        default="",
        metavar="OUT",
        help="when the run has ended well, write its model into OUT on the first host, and verify it",
    )
    last = "run CMD here when the run has ended well, after the --export: to give back the machines, say"
    add("--when-done", default="", metavar="CMD", help=last)


def _add_environment(group: argparse._ArgumentGroup) -> None:
    def add_list(flag: str, metavar: str, text: str, type_: type[str] | type[Path] = str) -> None:
        group.add_argument(flag, action="append", default=[], type=type_, metavar=metavar, help=text)

    add_list("--env", "K=V", "set an environment variable")
    add_list("--env-file", "FILE", "read K=V lines from FILE; names that look secret go as with --secret", Path)
    add_list("--secret", "NAME", "pass on this environment variable through SSH's standard input only")
    before = "shell line to run before torchrun on every host, such as 'module load cuda'"
    group.add_argument("--setup-line", default="", metavar="LINE", help=before)


def _add_slurm(group: argparse._ArgumentGroup) -> None:
    add, job = group.add_argument, 'submit a job with these sbatch options, such as "-N 4 -p gpu"; needs no hosts file'
    add("--slurm", metavar="OPTIONS", help=job)
    add("--cache", default="", metavar="DIR", help="HF_HOME on each node, such as '/nvme/$USER/hf'")
    add("--scratch", default="", metavar="DIR", help="TMPDIR on each node, such as '/nvme/$SLURM_JOB_ID'")


def source_flags(known: argparse.Namespace) -> list[str]:
    """Return the flags that say where settings come from, as they were given."""
    return [*flag("--preset", known.preset), *(word for path in known.config for word in flag("--config", path))]


def flag(name: str, value: str | Path | None) -> list[str]:
    """Return a flag and its value, if it was given one."""
    return [name, str(value)] if value else []
