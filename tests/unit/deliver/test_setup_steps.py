"""The steps of setup, run on this machine in a directory of the test's own."""

import os

import pytest

from llama405b_tools.deliver.plan import Step, Wishes
from llama405b_tools.deliver.progress import StepProgress
from llama405b_tools.deliver.setup import Work
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import HostError


@pytest.fixture
def work(tmp_path):
    with Fleet([Host("localhost", "hosts:1", workdir=str(tmp_path))]) as fleet:
        yield Work(fleet, tmp_path, "", Wishes(), "")


def test_a_long_step_is_said_again_with_the_last_line_of_its_output(work, tmp_path, capsys, monkeypatch):
    os.mkfifo(tmp_path / "go")
    work.progress = StepProgress(every_s=0.01)
    printed = work.progress._print

    def let_go(whose, what):
        printed(whose, what)
        if what.endswith("Downloading torch (2 GB)"):
            (tmp_path / "go").write_text("go\n")

    monkeypatch.setattr(work.progress, "_print", let_go)
    line = "echo Downloading torch '(2 GB)' >&2; read go <go; echo 2.13.0"
    assert work.take("localhost", Step("installing packages", line, "", "0.3 GB to download"), locked=False) == "2.13.0"
    said = capsys.readouterr().out
    assert "localhost: installing packages (0.3 GB to download)\n" in said
    assert "localhost: still installing packages: Downloading torch (2 GB)\n" in said


@pytest.mark.parametrize(
    ("line", "why"),
    [("echo no disk >&2; exit 3", "no disk"), ("printf 'no end of line'; false", "no end of line")],
)
def test_a_step_that_fails_says_its_last_line_and_what_to_do(work, line, why):
    with pytest.raises(HostError) as failed:
        work.take("localhost", Step("checking", line, "delete .venv"), locked=True)
    assert str(failed.value) == f"checking failed ({why}); delete .venv"


def test_a_step_whose_connection_breaks_has_failed(work, monkeypatch):
    monkeypatch.setattr(work.fleet.connection("localhost"), "stream", lambda line, stdin: iter(["half a li"]))
    with pytest.raises(HostError, match="the connection was lost"):
        work.take("localhost", Step("checking", "", "delete .venv"), locked=False)
