"""What follows a save and the end of a run: commands of the user's, each only after what it relies on. On this machine, with real parts."""

import json
import re

from conftest import ONE_HOST
from ops_rig import fake_trainer, metrics, settings, wait_for

FAILS_TWICE = (
    "if [ $LLAMA405B_STEP = 4 ] && [ $(cat tries | wc -l) -lt 2 ]; then echo >>tries; ls runs/s/checkpoints >>seen; exit 5; fi; "
    "mkdir -p sent && cp -r $LLAMA405B_CHECKPOINT sent/ && echo $LLAMA405B_STEP >>order"
)


def test_a_command_after_each_save_that_fails_twice_loses_nothing(work, cli, demo, corpus):
    (work / "hosts").write_text(ONE_HOST)
    (work / "tries").touch()
    flags = [*settings(demo, corpus, 16), "--after-save", FAILS_TWICE]
    flags += ["--export", "out", "--when-done", "cp out/config.json done-$LLAMA405B_RUN", "--price", 2.5]
    notify = 'printf \'%s %s\\n\' "$LLAMA405B_EVENT" "$LLAMA405B_MESSAGE" >>notes'
    done = cli(work, "launch", "--run", "s", "--restart", 1, "--notify", notify, *flags, timeout=120)
    assert done.returncode == 0, done.stderr
    notes = wait_for(
        lambda: (work / "notes").exists() and re.search("(?s).*^end .*", (work / "notes").read_text(), re.M), 120
    )[0]
    assert json.loads((work / "done-s").read_text())["architectures"] == ["LlamaForCausalLM"]
    log = (work / "runs/s/guard.log").read_text()
    assert log.index("read back 1 file of out: as written") < log.index("running cp out/config.json")
    assert re.search(r"after save failed node-a: exit code 5", notes), notes
    events = map(json.loads, (work / "runs/s/events/rank-0.jsonl").read_text().splitlines())
    saved = [event["step"] for event in events if event["kind"] == "saved"]  # on a busy machine one may be a step late
    assert [saved[0], saved[-1]] == [4, 16]
    assert [int(step) for step in (work / "order").read_text().split()] == saved  # each once, in order
    sent = sorted((work / "sent").iterdir())
    assert [path.name for path in sent] == [f"step-{step:08d}" for step in saved]
    for path in sent:  # whole
        manifest = json.loads((path / "manifest.json").read_text().splitlines()[0])
        assert all((path / name).stat().st_size == seal["bytes"] for name, seal in manifest["files"].items())
    assert list(metrics(work, "s")) == list(range(1, 17))  # training went on
    assert len(list((work / "runs/s/checkpoints").glob("step-*"))) <= 3
    page = cli(work, "report", "--run", "s")
    assert page.returncode == 0, page.stderr
    assert "checkpoint.after_save failed: node-a: exit code 5" in (work / "runs/s/report.html").read_text()


def test_nothing_follows_an_export_that_failed_or_a_run_that_did_not_end_well(work, cli, demo, corpus):
    wants = ["--export", "out", "--when-done", "touch done", "--price", 2.5]
    done = cli(work, "launch", "--run", "e", "--follow", *fake_trainer(demo, corpus, 8), *wants)
    assert done.returncode == 1, done.stdout
    assert "index.json is not JSON" in done.stdout  # nor is anything else of the fake trainer's what can be exported
    assert "--export failed: node-a: export was refused; see above; --when-done did not run" in done.stderr
    (work / "bad.py").write_text("raise SystemExit(3)")
    failed = cli(work, "launch", "--run", "f", "--follow", *wants[2:], "--", "bad.py")
    assert failed.returncode == 1, failed.stdout
    assert "--when-done did not run, because the run did not end well" in failed.stderr
    assert "its machines cost 5.00 an hour until they are released (2 x 2.5)" in failed.stderr
    assert not (work / "done").exists()
    jobs = (["--export", "out", "--follow", "--slurm", ""], "a job frees its nodes by itself")
    for flags, words in ((["--export", "out"], "nobody would see the end"), jobs):
        refused = cli(work, "launch", *fake_trainer(demo, corpus), *flags)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    unfit = cli(work, "launch", *fake_trainer(demo, corpus), "--export", "bad.py/out", "--follow")
    words = "node-a: --export=bad.py/out cannot be created or written: bad.py is not a directory; name a directory of your own."
    assert (unfit.returncode, f"{words} Nothing was started" in unfit.stderr) == (1, True), unfit.stderr
