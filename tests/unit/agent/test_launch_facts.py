import io
import json
import os
import shlex
import shutil
import subprocess
import sys

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from llama405b.contract import reader
from llama405b_tools.agent import launch_facts, machine
from llama405b_tools.agent.launch_facts import InputCheck
from llama405b_tools.agent.machine import DirectoryCheck, has_program
from llama405b_tools.launch.findings import place_words
from llama405b_tools.parsers import MIG_ON

ON_READ_ONLY = """
import json, sys
from llama405b.contract import reader
from llama405b_tools.agent import hostprobe, machine
place = reader.dumps(machine.check_writable_directory(sys.argv[1] + "/runs/r"))
print(json.dumps([json.loads(place), hostprobe.read_directory_facts(sys.argv[1], False, False)]))
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


@pytest.mark.parametrize(
    ("lines", "gpus", "fault"),
    [
        (["0, H100, 81559, [N/A]", f"1{', [GPU is lost]' * 3}"], [0], "GPU 1: GPU is lost (name and 2 more cannot be read)"),
        (["0, H100, 81559, Enabled", "1, H100, 81559, Enabled"], [0], f"GPU 0: {'; '.join(MIG_ON)}"),
        (["WARNING: infoROM is corrupted at gpu 0", "0, H100, 81559, Disabled"], [0], ""),
        (["Failed to initialize NVML: Driver/library version mismatch"], [], "Failed to initialize NVML: Driver/library version mismatch"),
    ],
)  # fmt: skip
def test_gpus_that_do_not_work_are_not_counted(tmp_path, monkeypatch, lines, gpus, fault):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.join(lines)}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found, said = machine.list_working_gpus()
    assert ([gpu.index for gpu in found], said) == (gpus, fault)
    assert machine.first_gpu(found) == (("H100", 81559 << 20) if gpus else ("", 0))


def test_drivers_that_know_no_mig_are_asked_without_it(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("""#!/bin/sh
case "$*" in *mig.mode*) echo 'Field "mig.mode.current" is not a valid field to query.';; *) echo 0, V100, 16160;; esac
""")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found, said = machine.list_working_gpus()
    assert ([gpu.index for gpu in found], said) == ([0], "")


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="NOT RUN: needs root and unshare")
def test_a_read_only_filesystem_is_not_told_as_its_owners(tmp_path):
    inside = f"mount -t tmpfs -o ro none {tmp_path} && exec {sys.executable} -c '{ON_READ_ONLY}' {tmp_path}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside], env=os.environ, capture_output=True, text=True, check=True
    )
    place, seen = json.loads(done.stdout)
    said = place_words(reader.build_record(DirectoryCheck, place, "a place"))
    assert said == f"the filesystem of {tmp_path} is read-only (after an I/O error, dmesg says why)"
    assert (seen["writable"], seen.get("read_only")) == (False, True)


TALK = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


def saved(to, form, record):
    """A table of one row, as Parquet or as `datasets` saves it."""
    table = pyarrow.Table.from_pylist([record])
    if form == "parquet":
        pyarrow.parquet.write_table(table, to / "a.parquet")
    else:
        (to / "state.json").write_text("{}")
        with pyarrow.ipc.new_stream(to / "data-00000-of-00001.arrow", table.schema) as stream:
            stream.write_table(table)
    return str(to)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_the_first_row_of_a_table_is_looked_at_where_pyarrow_is_there(demo, tmp_path, monkeypatch, form):
    def fault(record, *fields):
        check = InputCheck(str(demo), 64, 0, False, (saved(tmp_path, form, record),), fields=fields)
        return launch_facts._check_inputs(check)[0]

    assert "but its fields are 'q', 'a'; correct it, or say which fields to read" in fault({"q": "x", "a": "y"})
    assert ":1: is a conversation, but the tokenizer has no chat template; " in fault({"messages": TALK})
    assert fault({"instruction": "x", "output": "y"}) == ""
    assert fault({"q": "x", "a": "y"}, "prompt=q", "completion=a") == ""
    monkeypatch.setitem(sys.modules, "llama405b.data.documents", None)  # as where it is not installed
    assert fault({"q": "x", "a": "y"}) == ""


def test_the_first_row_is_read_without_its_row_group(tmp_path):
    text = [str(i).zfill(10) * 100 for i in range(20_000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet", compression="none")

    class Counting(io.FileIO):
        n_bytes = 0

        def read(self, size=-1):
            found = super().read(size)
            self.n_bytes += len(found)
            return found

    with Counting(tmp_path / "a.parquet") as raw:
        assert next(launch_facts._first_rows(raw, ())) == {"text": text[0]}
        assert raw.n_bytes < 5 << 20 < raw.seek(0, io.SEEK_END)
