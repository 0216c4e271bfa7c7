"""Which checkout goes to the hosts, wherever the program itself is installed."""

import subprocess
from pathlib import Path

import pytest

from conftest import ROOT
from llama405b.contract.errors import UserError
from llama405b_tools.deliver import install
from llama405b_tools.deliver.source_tree import SourceTree, TreeEntry
from llama405b_tools.hosts.transport import HostError


@pytest.fixture
def installed_elsewhere(monkeypatch, tmp_path):
    """As `uv tool install .` does it."""
    monkeypatch.setattr(install, "ROOT", tmp_path / "site-packages")


def test_a_program_sends_the_checkout_that_it_runs_from_or_is_started_in(request, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert install.project_root(tmp_path / "source") == ROOT
    request.getfixturevalue("installed_elsewhere")
    monkeypatch.chdir(ROOT)
    assert install.project_root(tmp_path / "source") == Path.cwd()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"not a checkout of the project, .* run setup in one"):
        install.project_root(tmp_path / "source")


def test_what_an_earlier_setup_has_copied_is_no_checkout(installed_elsewhere, monkeypatch, tmp_path):
    for name in ("pyproject.toml", "constraints.txt", "llama405b/__init__.py"):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).touch()
    monkeypatch.chdir(tmp_path / "here")
    assert install.project_root(tmp_path / "source") == tmp_path / "here"
    Path(install.MANIFEST).touch()
    with pytest.raises(UserError, match="not a checkout of the project"):
        install.project_root(tmp_path / "source")
    Path(".git").touch()  # a clone, to which somebody pushed
    assert install.project_root(tmp_path / "source") == tmp_path / "here"


def test_files_of_this_directory_are_not_overwritten(installed_elsewhere, monkeypatch, tmp_path):
    here = tmp_path / "mine"
    here.mkdir()
    monkeypatch.chdir(here)
    tree = SourceTree(tmp_path / "source", {"README.md": TreeEntry("f", ""), "pyproject.toml": TreeEntry("f", "")})
    installer = install.Installer(None, tree, install.SetupOptions(), "")
    assert installer._local_workdir() == here
    (here / "pyproject.toml").touch()
    with pytest.raises(HostError, match=r"mine/pyproject\.toml would be overwritten; run setup in an empty directory"):
        installer._local_workdir()
    (here / install.MANIFEST).touch()  # of an earlier setup
    assert installer._local_workdir() == here


def test_wheels_cannot_be_fetched_without_pip(installed_elsewhere, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="has no pip to fetch the wheels; install this program with pip"):
        install.make_wheelhouse(ROOT)
    assert not (tmp_path / install.WHEELHOUSE).exists()


def test_wheels_are_fetched_once(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder, ran = tmp_path / install.WHEELHOUSE, []

    def run(command, **_):
        ran.append(command)
        folder.mkdir(exist_ok=True)
        for name in ("torch-2-py3.whl", "rich-13-py3.whl", "llama405b-1-py3.whl"):
            (folder / name).touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(install.subprocess, "run", run)
    for _ in range(2):
        assert [path.name for path in install.make_wheelhouse(ROOT).glob("l*.whl")] == []
    assert len(ran) == 1
    (folder / "rich-13-py3.whl").unlink()
    install.make_wheelhouse(ROOT)
    assert len(ran) == 2
    monkeypatch.setattr(install, "BUILD_TOOLS", ("hatchling",))
    install.make_wheelhouse(ROOT)
    assert len(ran) == 3
