"""What export says of a checkpoint before it reads its tensors."""

from llama405b.commands.export import manifest_warning
from llama405b.contract import reader
from llama405b.contract.files import append_line
from llama405b.contract.paths import RunDir
from llama405b.contract.records import EventKind, RunEvent


def test_a_manifest_that_was_changed_since_it_was_saved_is_told(tmp_path):
    run, checkpoint = RunDir(tmp_path / "runs/r"), tmp_path / "runs/r/checkpoints/step-00000004"
    checkpoint.mkdir(parents=True)
    assert manifest_warning(checkpoint, "a") == ""  # nothing is recorded
    run.events("rank-0").parent.mkdir()
    for digest in ("a", "b"):  # saved again, after a resume from an older one
        path = "runs/r/checkpoints/step-00000004"  # as it is written, in the working directory
        append_line(
            run.events("rank-0"), reader.dumps(RunEvent(1.0, "rank-0", EventKind.SAVED, 1, 4, path, digest=digest))
        )
    assert [manifest_warning(checkpoint, digest) for digest in "ab"] == ["", ""]
    said = f"warning: {checkpoint}/manifest.json differs from what the run recorded when it saved; it was changed since"
    assert manifest_warning(checkpoint, "c") == said
    assert manifest_warning(checkpoint.with_name("step-00000008"), "c") == ""
