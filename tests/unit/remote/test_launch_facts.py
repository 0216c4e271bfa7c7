import json
import os
import shutil
import subprocess
import sys

import pytest

from llama405b.contract import reader
from llama405b_tools.remote.launch_facts import has_program
from llama405b_tools.remote.messages.launch import RunPlace
from llama405b_tools.run.preflight import place_words

ON_READ_ONLY = """
import json, sys
from llama405b.contract import reader
from llama405b_tools.remote import hostprobe, launch_facts
place = reader.dumps(launch_facts.place_of(sys.argv[1] + "/runs/r"))
print(json.dumps([json.loads(place), hostprobe.nearest_directory(sys.argv[1], False)]))
"""


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ((), True),
        (("train.py", "nosuch.py"), True),
        (("nosuch.py", "train.py"), False),
        (("folder",), False),
        (("-m", "json.tool"), True),
        (("--module", "no_such.module"), False),
        (("-m", ".relative"), True),  # torchrun's to refuse
        (("--no-python", "nvidia-smi"), True),  # torchrun's own options
    ],
)
def test_a_program_is_looked_for_and_not_run(tmp_path, monkeypatch, program, found):
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert has_program(program) is found


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="NOT RUN: needs root and unshare")
def test_a_read_only_filesystem_is_not_told_as_its_owners(tmp_path):
    inside = f"mount -t tmpfs -o ro none {tmp_path} && exec {sys.executable} -c '{ON_READ_ONLY}' {tmp_path}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside], env=os.environ, capture_output=True, text=True, check=True
    )
    place, seen = json.loads(done.stdout)
    said = place_words(reader.read(RunPlace, place, "a place"))
    assert said == f"the filesystem of {tmp_path} is read-only (after an I/O error, dmesg says why)"
    assert (seen["writable"], seen.get("read_only")) == (False, True)
