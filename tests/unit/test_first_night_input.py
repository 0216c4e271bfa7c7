"""What scripts/first_night.sh does before it reaches a host; a whole night is in ``tests/hosts/test_first_night.py``."""

import re
import subprocess

import pytest

from conftest import HOSTS, ROOT

SCRIPT = ROOT / "scripts/first_night.sh"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "name a hosts file"),
        (
            "absent",
            "absent: cannot be read (No such file or directory); pass the path of a hosts file (one host per line), "
            "or cd to its directory; a run is named with --run",
        ),
        ("one", "one: name two hosts, a line each"),
        ("range", "range: name two hosts, a line each"),
        ("hosts one", "one is one hosts file too many"),
        ("hosts --tiny --what", "--what is no option"),
        ("hosts --model", "--model needs a value"),
        ("hosts --data absent.txt", "--data: absent.txt is no file here"),
        ("hosts --tiny -- --model.layer 2", "--model.layer: 'model.layer' is not a setting"),
        ("hosts --out mine", "mine is of other hosts or another model; name another --out"),
    ],
)
def test_bad_input_changes_nothing(tmp_path, words, said):
    for name, text in (("hosts", HOSTS), ("one", "gpu-1\n"), ("range", "gpu-[1-2] slots=8\nother\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "mine").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        ["bash", SCRIPT, *words.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stdout
    assert done.stderr.startswith(f"first_night.sh: {said}")
    assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_each_row_that_it_decides_never_ran_on_several_nodes():
    table = re.findall(r"^\| (.*) \| (.*?) \|$", (ROOT / "docs/proof.md").read_text(), re.MULTILINE)
    decided = re.findall(r'step \w+ \d+ .* "(.*)"$', SCRIPT.read_text(), re.MULTILINE)
    for begins in (each for rows in decided if rows for each in rows.replace("\\", "").split(" + ")):
        assert [nodes for row, nodes in table if row.startswith(begins)] == ["never run"], begins
    assert len(decided) == 11
