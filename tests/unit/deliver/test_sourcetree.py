"""Code pushed to one directory by several hosts at the same time, and the message for a directory that cannot be written."""

import concurrent.futures
import os
import shutil
import subprocess

import pytest

from llama405b.contract.errors import UserError
from llama405b.contract.software import code_digest
from llama405b_tools.deliver.source_tree import MANIFEST, describe_tree, git_tree, push_tree
from llama405b_tools.hosts.transport import HostError, Local


@pytest.fixture
def calls_of(tmp_path, monkeypatch):
    """Record where a program is called; returns the file with a line for each call."""

    def record(program):
        calls, stand_in = tmp_path / f"calls of {program}", tmp_path / "bin" / program
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(f'#!/bin/sh\npwd >>"{calls}"\nexec {shutil.which(program)} "$@"\n')
        stand_in.chmod(0o755)
        monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
        return calls

    return record


def names_of(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "here"
    for i in range(60):
        path = root / f"part {i % 5}" / f"module_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {i}\n" * 50)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    return root, names_of(root)


def test_several_may_push_to_one_directory_at_once(tree, tmp_path, calls_of):
    root, names = tree
    places = calls_of("tar")  # where each unpacks: two tars in one place trip each other
    lines, to = describe_tree(root, names), str(tmp_path / "there")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(push_tree, Local(), lines, to) for _ in range(8)]
    assert f"{len(names)} files sent, 0 deleted" in [job.result() for job in sent]
    unpacked = places.read_text().splitlines()  # one that begins when another has ended has nothing to send
    assert len(set(unpacked)) == len(unpacked) > 1
    there = tmp_path / "there"
    assert names_of(there) == sorted([MANIFEST, *names])
    assert (there / "part 3/module_8.py").read_text() == (root / "part 3/module_8.py").read_text()
    assert (there / "run.sh").stat().st_mode & 0o111


def test_what_is_gone_here_goes_there_and_what_is_not_ours_stays(tree, tmp_path):
    root, names = tree
    there = tmp_path / "there"
    push_tree(Local(), describe_tree(root, names), str(there))
    (there / "notes.txt").write_text("mine")
    (root / "run.sh").write_text("#!/bin/sh\necho new\n")
    kept = [name for name in names if not name.endswith("module_7.py")]
    assert push_tree(Local(), describe_tree(root, kept), str(there)) == "1 file sent, 1 deleted"
    assert (there / "run.sh").read_text().endswith("new\n")
    assert not (there / "part 2/module_7.py").exists()
    assert (there / "notes.txt").read_text() == "mine"


def _write(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")


OURS = ("llama405b/__init__.py", "tools/llama405b_tools/__init__.py", "pyproject.toml")


def test_a_clone_loses_the_modules_that_we_removed_since_and_keeps_what_is_the_users(tmp_path):
    root, clone = tmp_path / "here", tmp_path / "clone"
    _write(root, *OURS)
    old = ("llama405b/optim/old.py", "tools/llama405b_tools/old.toml", "tools/llama405b_tools/my odd.json")
    kept = ("llama405b/notes.md", "tools/old.py", "runs/r/llama405b/old.py", "mine.py", "scripts/old.py")
    _write(clone, *OURS, *old, *kept, "llama405b/changed.py")
    for words in ("init -q", "add ."):
        subprocess.run(["git", "-C", clone, *words.split()], check=True)
    _write(clone, "llama405b/mine.py", "llama405b/.hidden/mine.py", "llama405b/__pycache__/old.pyc")
    (clone / "llama405b/changed.py").write_text("somebody's work, which git has not\n")
    assert code_digest(clone) != code_digest(root)
    lines, mine = (
        describe_tree(root, OURS),
        f"; its code differs, run there: cd {clone} && rm ./llama405b/changed.py ./llama405b/mine.py",
    )
    assert push_tree(Local(), lines, str(clone)) == f"0 files sent, 3 deleted{mine}"
    assert push_tree(Local(), lines, str(clone)) == f"0 files sent, 0 deleted{mine}"
    assert [name for name in old if (clone / name).exists()] == []
    assert [name for name in kept if not (clone / name).exists()] == []
    subprocess.run(mine.partition("there: ")[2], shell=True, check=True)
    assert code_digest(clone) == code_digest(root)
    assert push_tree(Local(), lines, str(clone)) == "0 files sent, 0 deleted"


def test_code_of_the_users_own_leaves_our_packages_beside_it_alone(tmp_path):
    root, clone = tmp_path / "here", tmp_path / "clone"
    _write(root, "train.py")
    _write(clone, *OURS)
    for words in ("init -q", "add ."):
        subprocess.run(["git", "-C", clone, *words.split()], check=True)
    assert push_tree(Local(), describe_tree(root, ["train.py"]), str(clone)) == "1 file sent, 0 deleted"
    assert [name for name in OURS if not (clone / name).exists()] == []


def test_a_file_that_cannot_be_put_in_its_place_is_said(tree, tmp_path):
    root, names = tree
    (tmp_path / "there/run.sh").mkdir(parents=True)
    (tmp_path / "there/run.sh/mine").write_text("not ours")
    with pytest.raises(HostError, match=r"the files could not be written \(mv: .*run\.sh"):
        push_tree(Local(), describe_tree(root, names), str(tmp_path / "there"))
    assert not list((tmp_path / "there").glob(f"{MANIFEST}.*"))
    assert push_tree(Local(), describe_tree(root, []), str(tmp_path / "there")) == f"0 files sent, {len(names)} deleted"
    assert names_of(tmp_path / "there") == [MANIFEST, "run.sh/mine"]


def test_a_directory_that_became_a_file_and_a_file_that_became_a_directory(tree, tmp_path):
    root, _ = tree
    there = tmp_path / "there"
    (root / "deep/er").mkdir(parents=True)
    (root / "deep/er/a.py").write_text("a")
    (root / "flat").write_text("b")
    push_tree(Local(), describe_tree(root, names_of(root)), str(there))
    shutil.rmtree(root / "deep")
    (root / "deep").write_text("c")
    (root / "flat").unlink()
    (root / "flat").mkdir()
    (root / "flat/d.py").write_text("d")
    names = names_of(root)
    assert push_tree(Local(), describe_tree(root, names), str(there)) == "2 files sent, 2 deleted"
    assert names_of(there) == sorted([MANIFEST, *names])


def test_an_empty_tree_deletes_what_an_earlier_push_sent(tree, tmp_path):
    root, names = tree
    there = tmp_path / "there"
    push_tree(Local(), describe_tree(root, names), str(there))
    assert push_tree(Local(), describe_tree(root, []), str(there)) == f"0 files sent, {len(names)} deleted"
    assert names_of(there) == [MANIFEST]


def test_what_has_not_changed_is_hashed_once(tree, tmp_path, calls_of):
    root, names = tree
    lines, to = describe_tree(root, names), str(tmp_path / "there")
    push_tree(Local(), lines, to)
    calls = calls_of("sha256sum")
    assert push_tree(Local(), lines, to) == "0 files sent, 0 deleted"
    assert calls.read_text() == f"{to}\n"


def git(root, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", root, *who, *words], check=True, capture_output=True)


def test_submodules_are_sent_and_what_is_not_sent_is_named(tmp_path):
    library, root, there = tmp_path / "library", tmp_path / "here", tmp_path / "there"
    _write(library, "mylib/__init__.py")
    _write(root, "train.py", "ignored/data.txt", "other")
    (root / ".gitignore").write_text("ignored\n")
    for path in (library, root):
        git(path, "init", "-q")
        git(path, "add", ".")
        git(path, "commit", "-q", "-m", "a")
    git(root, "submodule", "add", str(library), "lib")
    git(root, "submodule", "add", str(library), "away")
    git(root, "submodule", "deinit", "-f", "away")
    (root / "lib/mylib/new.py").write_text("not added")
    tree = git_tree(root)
    missing = "a submodule that is not checked out; run `git submodule update --init --recursive`"
    assert tree.notes == (f"left out: away/ ({missing})",)
    assert tree.ignored == ("ignored/",)
    push_tree(Local(), tree, str(there))
    sent = [".gitignore", ".gitmodules", "lib/mylib/__init__.py", "lib/mylib/new.py", "other", "train.py"]
    assert names_of(there) == sorted([MANIFEST, *sent])


def test_links_lead_where_they_did_or_are_named(tmp_path):
    root, there = tmp_path / "here", tmp_path / "there"
    _write(root, "shared/a.yaml")
    _write(tmp_path, "outside/b.yaml")
    for name, target in {
        "inside": "shared", "absolute": root / "shared/a.yaml", "file": "../outside/b.yaml", "folder": "../outside", "missing": "nowhere",
    }.items():  # fmt: skip
        (root / name).symlink_to(target)
    tree = describe_tree(root, ["shared/a.yaml", "inside", "absolute", "file", "folder", "missing"])
    note = "note: {} is sent as a link to {}, which is not sent"
    assert tree.notes == (note.format("folder", "../outside"), note.format("missing", "nowhere"))
    push_tree(Local(), tree, str(there))
    assert [str((there / name).readlink()) for name in ("inside", "absolute")] == ["shared", "shared/a.yaml"]
    assert (there / "file").read_text() == "# outside/b.yaml\n"
    assert not (there / "file").is_symlink()
    assert (there / "missing").is_symlink()
    assert push_tree(Local(), describe_tree(root, ["shared/a.yaml"]), str(there)) == "0 files sent, 5 deleted"
    assert not (there / "missing").is_symlink()


def test_a_change_of_the_execute_bit_alone_is_sent(tree, tmp_path):
    root, names = tree
    there = tmp_path / "there"
    push_tree(Local(), describe_tree(root, names), str(there))
    (root / "run.sh").chmod(0o644)
    assert push_tree(Local(), describe_tree(root, names), str(there)) == "1 file sent, 0 deleted"
    assert not (there / "run.sh").stat().st_mode & 0o111


@pytest.mark.slow
def test_what_changes_while_it_is_sent_is_said(tree, tmp_path):
    root, names = tree
    described = describe_tree(root, names)
    (root / "run.sh").write_text("changed since")
    with pytest.raises(HostError, match=r"^run\.sh differs on the host from what was read here; push again$"):
        push_tree(Local(), described, str(tmp_path / "there"))


def test_a_submodule_that_git_does_not_read_is_not_taken_for_empty(tmp_path):
    _write(tmp_path, "here/train.py", "library/a.py")
    for path in ("library", "here"):
        git(tmp_path / path, "init", "-q")
        git(tmp_path / path, "add", ".")
        git(tmp_path / path, "commit", "-q", "-m", "a")
    git(tmp_path / "here", "submodule", "add", str(tmp_path / "library"), "lib")
    (tmp_path / "here/lib/.git").write_text("gitdir: /nowhere\n")
    with pytest.raises(UserError, match=r"lib: git cannot read this work tree \("):
        git_tree(tmp_path / "here")


def test_a_push_onto_the_tree_itself_changes_nothing(tree, tmp_path):
    root, names = tree
    (tmp_path / "outside").write_text("theirs")
    (root / "link").symlink_to("../outside")
    (tmp_path / "by another name").symlink_to(root)
    for to in (root, tmp_path / "by another name"):
        assert push_tree(Local(), describe_tree(root, [*names, "link"]), str(to)) == "0 files sent, 0 deleted"
        assert (root / "link").is_symlink()
        assert names_of(root) == sorted([*names, "link"])


def test_where_execute_bits_cannot_be_kept_the_content_counts(tree, tmp_path):
    root, names = tree

    class Fixed(Local):
        """A host whose file system says of every file that it may be executed."""

        def run(self, command, stdin, timeout_s):
            return super().run(command.replace("stat -c %a --", "stat -c 755 --"), stdin, timeout_s)

    for n_sent in (len(names), len(names) - 1):
        said = f"{n_sent} files sent, 0 deleted; its file system does not keep execute bits"
        assert push_tree(Fixed(), describe_tree(root, names), str(tmp_path / "there")) == said


def test_a_file_that_is_gone_since_is_said(tree, tmp_path):
    root, names = tree
    described = describe_tree(root, names)
    (root / "run.sh").unlink()
    with pytest.raises(HostError, match=r"^run\.sh cannot be read any more \(No such file or directory\); push again$"):
        push_tree(Local(), described, str(tmp_path / "there"))


def test_a_work_tree_that_git_does_not_read_is_not_taken_for_data(tmp_path, monkeypatch):
    _write(tmp_path, "here/train.py")
    git(tmp_path / "here", "init", "-q")
    (tmp_path / "here/.git/HEAD").write_text("broken")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(UserError, match=r"here: git cannot read this work tree \("):
        git_tree(tmp_path / "here")
