"""The first command of the README, run in a fresh clone without a .venv until the demo ends, after fewer steps."""

import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

LN_VOCAB = math.log(2048)


@pytest.mark.timeout(900)
def test_fresh_clone_trains_the_demo(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True, timeout=60)
    demo = clone / "llama405b/settings/presets/demo.toml"
    shorter, count = re.subn(
        r"(max_steps|every|max_bytes) = (200|100|6000000)\b",
        lambda found: f"{found[1]} = {int(found[2]) // 10}",
        demo.read_text(),
    )
    assert count == 3
    demo.write_text(shorter)
    elsewhere = [each for each in os.environ["PATH"].split(":") if not Path(each, "llama405b").exists()]
    env = os.environ | {"PATH": ":".join(elsewhere)}  # a user's: the program is in no directory of it
    done = subprocess.run(
        ["bash", "launch.sh"], cwd=clone, env=env, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [run] = [p for p in (clone / "runs").iterdir() if not p.name.startswith(".")]
    before, *steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (before["step"], before["evaluation_loss"]) == (0, pytest.approx(LN_VOCAB, abs=0.3))
    losses = [each["loss"] for each in steps]
    assert losses[0] == pytest.approx(LN_VOCAB, abs=0.3)
    assert sum(losses[-10:]) / 10 < 0.85 * LN_VOCAB
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == ["step-00000010", "step-00000020"]
    summary = done.stdout[done.stdout.rindex("\n\n") :]
    assert re.search(
        r"steps 1-20, loss 7\.\d+ -> [3456]\.\d+ .*, evaluation 7\.\d+ -> [456]\.\d+ after step 20, .* tokens/s on 2 ranks of 2 hosts",
        summary,
    )
    assert "checkpoint: runs/" in summary
    assert "next: " in summary
    [(program, name)] = re.findall(r"^  (\S+) top --run (\S+) ", done.stdout, re.MULTILINE)
    top = [clone / program, "top", "--run", name, "--once"]
    shown = subprocess.run(top, cwd=clone, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert re.search(rf"(?m)^{name} DONE .*\nstep 20/20 100%", shown.stdout)

    again = subprocess.run(
        ["bash", str(clone / "launch.sh"), "my-hosts", "--preset", "demo", "--dry-run"],
        cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert again.returncode == 2
    assert "my-hosts: cannot be read" in again.stderr
    assert "installing" not in again.stdout
