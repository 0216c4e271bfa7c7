"""The list of all runs."""

import time

from llama405b.contract.records import Cause, CauseKind, NodeState, NodeStatus
from llama405b_tools.agent.messages import HostRun, StatusReply
from llama405b_tools.hosts.transport import HostError
from llama405b_tools.run import query


def run(name, created, *, exit_code=0, alive=False):
    cause = Cause(CauseKind.RANK_EXIT, "a", 0, exit_code=exit_code) if exit_code else None
    status = NodeStatus(
        "a", NodeState.RUNNING if alive else NodeState.EXITED, 1, 1, 1, exit_code=exit_code, cause=cause
    )
    return HostRun(name, created, 1, "", 0, alive, (), status, (), (), "", None, None, 0.0)


def test_every_run_with_its_hosts_and_states_newest_first():
    at = time.mktime((2026, 11, 21, 8, 30, 0, 0, 0, -1))
    outcomes = {
        "gpu-1": StatusReply((run("new", at, alive=True), run("old", 1.0))),
        "gpu-2": StatusReply((run("new", at, alive=True), run("old", 1.0, exit_code=3))),
        "gpu-3": HostError("gone"),
    }
    rows = [query.run_row(name, known) for name, known in query.hosts_by_run(outcomes).items()]
    assert rows[0] == ("new", "2026-11-21 08:30", "gpu-[1-2]", "running", "—")
    assert (rows[1][0], rows[1][3]) == ("old", "finished on gpu-1; exited 3 on gpu-2")
