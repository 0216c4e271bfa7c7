"""Which checkout goes to the hosts, wherever the program itself is installed."""

import subprocess
from pathlib import Path

import pytest

from conftest import ROOT
from llama405b.contract.errors import UserError
from llama405b_tools.deliver import install


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
