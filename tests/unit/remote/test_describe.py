"""What a host tells of its runs, whatever it may not read."""

from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.contract.plan import Node, Plan
from llama405b_tools.remote import describe
from llama405b_tools.remote.messages.status import StatusRequest


def test_checkpoints_of_another_user_do_not_hide_the_run(tmp_path, monkeypatch):
    def denied(root):
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(describe, "newest_complete", denied)
    nodes = (Node("a", 1, 0, "/w", "/py", "", "", {}),)
    write_json(RunDir.here("r").plan, Plan("r", 1, 0.0, "r-1-x", "a:1", ("-m", "llama405b.train"), (), nodes))
    [run] = describe.status(StatusRequest("a")).runs
    assert (run.run, run.checkpoint) == ("r", None)
