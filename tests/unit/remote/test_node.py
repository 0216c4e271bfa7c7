"""The node runner's own log: each attempt's line comes before what its torchrun writes."""

from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import Node, Plan
from llama405b_tools.remote import node as node_runner
from llama405b_tools.remote.node import NodeRunner


def test_the_line_of_an_attempt_is_on_disk_before_torchrun_starts(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "runs/r")
    write_json(run.plan, Plan("r", 3, 5.0, "r-3-x", "a:1", ("-m", "mine"), (),
                              (Node("a", 1, 0, str(tmp_path), "/py", "10.0.0.1", "lo", {}),)))  # fmt: skip
    seen = []
    monkeypatch.setattr(node_runner.subprocess, "Popen", lambda *_, **__: seen.append(run.agent_log("a").read_bytes()))
    NodeRunner(run, "a").start_torchrun()
    assert seen[0].startswith(b'\nattempt 3: ["/py", "-m", "torch.distributed.run"')
