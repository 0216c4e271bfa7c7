"""Trees that are pushed, as code and as data, beside `rsync -a` of the same: 20 of them, 200 with --soak."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from random_tree import RandomTree, described

from llama405b.contract.errors import UserError
from llama405b_tools.agent.transfer import BrokenLinkError, Receiver, list_files, open_files, send_files
from llama405b_tools.deliver.source_tree import MANIFEST, git_tree, push_tree
from llama405b_tools.hosts.transport import HostError, Local

pytestmark = pytest.mark.skipif(not shutil.which("rsync"), reason="NOT RUN: needs rsync")
SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(20, 200))]


class Interrupted(Local):
    """A connection that breaks at one of its calls."""

    def __init__(self, at):
        self.calls, self.at = 0, at

    def run(self, command, stdin, timeout_s):
        self.calls += 1
        if self.calls == self.at:
            raise HostError("the connection was lost")
        return super().run(command, stdin, timeout_s)


def rsync(root, to):
    subprocess.run(["rsync", "-ac", "--delete", "--exclude=.git", "--exclude=ignored*", f"{root}/", to], check=True)
    return described(to)


def is_sent(link, there):
    """Whether what a link leads to is in a tree: a file or link, or what they are in."""
    return any(name == link or name.startswith(link + b"/") for name in there)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_code_is_there_as_rsync_copies_it(seed, tmp_path):
    made = RandomTree(seed, tmp_path / "here", git=True)
    root, to = tmp_path / "here", tmp_path / "there"
    with contextlib.suppress(HostError):
        push_tree(Interrupted(1 + seed % 4), git_tree(root), str(to))
    for _ in range(2):
        tree = git_tree(root)
        push_tree(Local(), tree, str(to))
        expected = rsync(root, tmp_path / "theirs")
        real = os.path.realpath(os.fsencode(root))
        for name, target in expected.items():
            if isinstance(target, bytes):
                path = os.path.join(real, name)
                leads = os.path.relpath(os.path.normpath(os.path.join(os.path.dirname(path), target)), real)
                if is_sent(leads, expected):  # an absolute one leads there on the host, too
                    expected[name] = os.path.relpath(target, os.path.dirname(path)) if os.path.isabs(target) else target
                elif os.path.isfile(path):
                    with open(path, "rb") as file:
                        expected[name] = file.read(), bool(os.stat(path).st_mode & 0o111)
                else:
                    assert any("is sent as a link" in note for note in tree.notes)
        found = described(to)
        assert found.pop(MANIFEST.encode())
        assert found == expected
        assert push_tree(Local(), tree, str(to)) == "0 files sent, 0 deleted"
        made.change()


class Cut:
    """A connection that breaks once so many bytes are sent."""

    def __init__(self, link, left):
        self.link, self.left, self.recv = link, left, link.recv

    def sendall(self, data):
        self.link.sendall(data[: self.left])
        self.left -= len(data)
        if self.left < 0:
            raise OSError("the connection was lost")


def _send(root, to, cut=1 << 40):
    receiver = Receiver(to, "token")
    with ThreadPoolExecutor() as pool:
        received = pool.submit(receiver.run, None)
        with socket.create_connection(("127.0.0.1", receiver.port)) as link:
            send_files(open_files(root, None), "token", Cut(link, cut), lambda _: None)
            received.result(60)
    return receiver.faults


def _mend_links(root):
    """Delete the links for which data is refused; each is named."""
    while True:
        refused = [
            path
            for path in root.rglob("*")
            if path.is_symlink() and (not path.exists() or path.resolve() in path.parents)
        ]
        if not refused:
            break
        with pytest.raises(UserError, match="is a link to"):
            list_files(root)
        for path in refused:
            path.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_data_is_there_as_rsync_copies_it_through_links(seed, tmp_path):
    made = RandomTree(seed, tmp_path / "here", git=False)
    root, to = tmp_path / "here", tmp_path / "there"
    to.mkdir()
    for _ in range(2):
        _mend_links(root)
        with contextlib.suppress(BrokenLinkError):
            _send(root, to, random.Random(seed).choice((10, 1_000, 50_000, 100_000)))
        _send(root, to)
        assert _send(root, to) == []  # what differed was dropped, and is sent again
        theirs = tmp_path / "theirs"
        subprocess.run(["rsync", "-aLc", "--delete", f"{root}/", theirs], check=True)
        found = {name: what for name, what in described(to).items() if name != b".llama405b-hashes.json"}
        assert {name: found.get(name) for name in described(theirs)} == described(theirs)
        made.change()
