"""`launch --evaluate-only`: a model's loss on held-out data, in a run of its own."""

import json
import re

from conftest import ONE_HOST


def test_a_model_is_evaluated_without_training(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    only = [
        "--evaluate-only",
        "--preset",
        "demo",
        "--model.path",
        demo,
        "--evaluation.paths",
        corpus,
        "--data.seq_len",
        64,
    ]
    done = cli(work, "launch", *only, "--run", "base", "--follow", "--checkpoint.dir", work / "shared")
    assert done.returncode == 0, done.stdout + done.stderr
    [loss] = re.findall(rf"^evaluation of {demo}: loss (\S+), perplexity \S+ \(.* in 32 sequences\)", done.stdout, re.M)
    [line] = [json.loads(line) for line in (work / "runs/base/metrics.jsonl").read_text().splitlines()]
    assert (line["step"], f"{line['evaluation_loss']:.4f}") == (0, loss)
    assert "bytes per parameter" not in done.stdout
    assert "steps" not in done.stdout
    assert not (work / "shared").exists()
    status = cli(work, "status").stdout
    assert status.count("finished") == 1
    assert status.endswith(f"evaluation of step 0: loss {loss}\n")
    shown = json.loads(cli(work, "top", "--once", "--json").stdout)["training"]
    assert (shown["phase"], shown["evaluated_step"], shown["lost_steps"]) == ("DONE", 0, None)
    typo = cli(work, "launch", *only, "--run", "typo", "--follow", "--resume", "nowhere/step-00000004")
    assert typo.returncode == 1
    assert "--resume: no host has the directory nowhere/step-00000004; name a checkpoint" in typo.stderr
    assert not (work / "nowhere").exists()
    again = cli(work, "launch", *only, "--run", "base")
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)
    assert again.stderr.endswith("choose another name\n")
