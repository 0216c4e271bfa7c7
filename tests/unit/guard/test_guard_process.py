"""A guard is started when it says so, whatever its order's size and whether its record could be written."""

import os
import signal
import sys
import types
from pathlib import Path

import pytest

from llama405b.contract.errors import RunError
from llama405b_tools.guard import process

ORDER = "x" * 300_000  # more than a pipe holds
WATCHES = (
    "import os, sys; sys.stdin.read(); os.write(int(sys.argv[1]), b'+'); os.close(int(sys.argv[1])); sys.stdin.read()"
)


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Start a program in place of the guard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process.reader, "dumps", lambda _: ORDER)
    order = types.SimpleNamespace(plan=types.SimpleNamespace(run="r"))

    def begin(program):
        monkeypatch.setattr(process, "module_argv", lambda _: [sys.executable, "-c", program])
        return process.start_guard(order)

    return begin


def test_a_guard_that_cannot_write_its_record_is_left_alone(start, tmp_path):
    guard = start(WATCHES)
    assert not (tmp_path / "runs/r/guard.json").exists()
    assert guard.child.wait(30) == 0  # it read all of its order


def test_a_guard_that_dies_before_it_reads_is_explained_by_its_log(start):
    with pytest.raises(RunError, match=r"^it did not start \(no paramiko\)$"):
        start("import sys; sys.exit('no paramiko')")


def test_a_guard_that_says_nothing_is_ended(start, monkeypatch, tmp_path):
    monkeypatch.setattr(process, "START_TIMEOUT_S", 0.5)
    with pytest.raises(RunError, match=r"^it did not start \(it said nothing within 0 s\)$"):
        start(f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    pid = tmp_path / "pid"
    assert not pid.exists() or not Path(f"/proc/{pid.read_text()}").exists()


def test_a_guard_that_is_not_waited_for_is_named(start, monkeypatch, capsys):
    monkeypatch.setattr(process.select, "select", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        start(WATCHES)
    assert capsys.readouterr().out.startswith("guard starting as pid ")
