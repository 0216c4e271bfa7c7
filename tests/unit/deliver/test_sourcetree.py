"""Code pushed to one directory by several hosts at the same time, and the message for a directory that cannot be written."""

import concurrent.futures
import os
import shutil

import pytest

from llama405b_tools.deliver import sourcetree
from llama405b_tools.hosts.transport import HostError, Local


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "here"
    for i in range(60):
        path = root / f"part {i % 5}" / f"module_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {i}\n" * 50)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    return root, sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_several_may_push_to_one_directory_at_once(tree, tmp_path, monkeypatch):
    root, names = tree
    programs, places = (
        tmp_path / "bin",
        tmp_path / "places",
    )  # where each unpacks: two tars in one place trip each other
    programs.mkdir()
    (programs / "tar").write_text(f'#!/bin/sh\npwd >>{places}\nexec {shutil.which("tar")} "$@"\n')
    (programs / "tar").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    lines, to = sourcetree.manifest(root, names), str(tmp_path / "there")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(sourcetree.push, Local(), root, lines, to) for _ in range(8)]
    assert max(job.result()[0] for job in sent) == len(names)
    assert len(set(places.read_text().splitlines())) == 8
    there = tmp_path / "there"
    assert {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()} == {
        *names,
        sourcetree.MANIFEST,
    }
    assert (there / "part 3/module_8.py").read_text() == (root / "part 3/module_8.py").read_text()
    assert (there / "run.sh").stat().st_mode & 0o111


def test_what_is_gone_here_goes_there_and_what_is_not_ours_stays(tree, tmp_path):
    root, names = tree
    there = tmp_path / "there"
    sourcetree.push(Local(), root, sourcetree.manifest(root, names), str(there))
    (there / "notes.txt").write_text("mine")
    (root / "run.sh").write_text("#!/bin/sh\necho new\n")
    kept = [name for name in names if not name.endswith("module_7.py")]
    assert sourcetree.push(Local(), root, sourcetree.manifest(root, kept), str(there)) == (1, 1)
    assert (there / "run.sh").read_text().endswith("new\n")
    assert not (there / "part 2/module_7.py").exists()
    assert (there / "notes.txt").read_text() == "mine"


def test_a_file_that_cannot_be_put_in_its_place_is_said(tree, tmp_path):
    root, names = tree
    (tmp_path / "there/run.sh/in-the-way").mkdir(parents=True)
    with pytest.raises(HostError, match="the files could not be written"):
        sourcetree.push(Local(), root, sourcetree.manifest(root, names), str(tmp_path / "there"))
    assert not list((tmp_path / "there").glob("*.d"))
