"""Tab completion, asked as the shell asks."""

import os
import subprocess
import sys

import pytest

from conftest import ROOT


@pytest.fixture
def complete(tmp_path):
    def ask(line, program="main"):
        said = tmp_path / "said"
        said.write_text("")
        env = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(said),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "COMP_TYPE": "9",
            "PYTHONPATH": f"{ROOT}:{ROOT}/tools",
        }
        code = f"from llama405b_tools import cli; cli.{program}()"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("", "")
        return [word.strip() for word in said.read_text().split("\x0b") if word]

    return ask


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("llama405b sta", ["status"]),
        ("llama405b status --j", ["--json"]),
        ("llama405b logs hosts --first", ["--first-error"]),
        ("llama405b launch --training.max", ["--training.max_steps"]),
        ("llama405b launch --restart 3 --preset dem", ["demo"]),
        ("llama405b train --optimizer.l", ["--optimizer.lr"]),
        ("llama405b stop --run my", ["my-run"]),
        ("llama405b attach hos", ["hosts"]),
        ("llama405b logs --output j", ["json"]),
        ("llama405b nonsense --j", []),
    ],
)
def test_verbs_options_settings_and_runs_are_completed(complete, tmp_path, line, found):
    (tmp_path / "hosts").touch()
    (tmp_path / "runs/my-run").mkdir(parents=True)
    assert complete(line) == found


def test_every_verb_is_offered(complete):
    assert {"doctor", "launch", "status", "train"} <= set(complete("llama405b "))


def test_cluster_top_is_a_verb_of_its_own(complete):
    assert complete("cluster-top --rep", "cluster_top") == ["--replay"]
