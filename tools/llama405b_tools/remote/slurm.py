"""What Slurm reports about a job. The only module that calls its programs. Standard library."""

import subprocess
from collections.abc import Sequence

from llama405b.contract.errors import RunError, UserError

TIMEOUT_S = 30.0
GONE = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
)


def job_state(job: str) -> str:
    """A job's state as Slurm writes it (PENDING, RUNNING, COMPLETED, …); COMPLETED if Slurm has forgotten it.

    Raises:
        RunError: Slurm does not answer.
    """
    done = call(["squeue", "-h", "-j", job, "-o", "%T", "-t", "all"])
    if done.returncode and "Invalid job id" not in done.stderr:
        raise RunError(f"squeue does not answer ({' '.join(done.stderr.split())[:200]}); try it by hand")
    return [*done.stdout.split(), "COMPLETED"][0].partition("+")[0]


def why_pending(job: str) -> str:
    """Why a job waits, in Slurm's words."""
    return call(["squeue", "-h", "-j", job, "-o", "%R"]).stdout.strip().strip("()") or "no reason given"


def alive(job: str) -> bool:
    """Whether anything of a job may still run."""
    return job_state(job) in ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "STOPPED")


def call(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run one of Slurm's programs.

    Raises:
        UserError: It is not installed.
        RunError: It does not answer.
    """
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise UserError(f"{argv[0]} is not installed here; run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{argv[0]} does not answer within {TIMEOUT_S:.0f} s; Slurm's controller may be down") from None
