"""The kernel's log, in the form in which /dev/kmsg gives it: one record per read, from the beginning of what is kept."""

import os
import socket
import time
import types
from pathlib import Path

import pytest

from llama405b_tools.agent import sampler
from llama405b_tools.agent.sampler import MAX_KERNEL_LINES, KernelLog, Machine

XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=4711, name=python, GPU has fallen off the bus."


class Kernel:
    """Stands in for the kernel: a socket that keeps messages apart, and does not wait, reads as /dev/kmsg does."""

    def __init__(self):
        self.said, heard = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        heard.setblocking(False)
        self.log = KernelLog(os.devnull)
        self.heard, self.log.file = heard, heard.fileno()

    def logs(self, text, since_boot_s):
        self.said.send(f"4,1234,{since_boot_s * 1e6:.0f},-,caller=T1;{text}\n SUBSYSTEM=pci\n DEVICE=+pci\n".encode())


@pytest.fixture
def kernel():
    made = Kernel()
    yield made
    made.said.close()
    made.heard.close()


@pytest.fixture
def clock(monkeypatch):
    """The host's: ``epoch_s``, and ``uptime_s`` since its boot."""
    made = types.SimpleNamespace(epoch_s=1.7e9, uptime_s=5000.0)
    clocks = types.SimpleNamespace(time=lambda: made.epoch_s, monotonic=lambda: made.uptime_s)
    monkeypatch.setattr(sampler, "time", clocks)
    return made


@pytest.mark.parametrize("uptime_s", [70.0, 5000.0])
def test_lines_from_before_it_began_have_the_time_at_which_they_were_logged(kernel, clock, uptime_s):
    clock.uptime_s = uptime_s
    kernel.logs("usb 1-1: new device", uptime_s - 70)
    kernel.logs(XID, uptime_s - 60)
    kernel.logs("Out of memory: Killed process 4711 (python)", uptime_s - 50)
    (first, xid), (second, oom) = kernel.log.read_new()
    assert (xid, oom) == (XID, "Out of memory: Killed process 4711 (python)")
    assert (first, second) == (clock.epoch_s - 60, clock.epoch_s - 50)
    assert kernel.log.read_new() == []


def test_a_clock_that_parted_from_this_one_makes_no_new_line_old_or_one_of_the_future(kernel, clock):
    kernel.log.read_new()
    looked_s = clock.epoch_s
    clock.epoch_s += 30
    for parted_s, logged_s in ((-3600, looked_s), (3600, clock.epoch_s)):
        kernel.logs(XID, clock.uptime_s + parted_s)
        assert [logged for logged, _ in kernel.log.read_new()] == [logged_s]


def test_of_many_lines_the_newest_are_told(kernel):
    log = kernel.log
    log._records = lambda: (f"4,{i},{i},-;oom-kill {i}\n".encode() for i in range(3 * MAX_KERNEL_LINES))
    lines = [text for _, text in log.read_new()]
    assert (len(lines), lines[-1]) == (MAX_KERNEL_LINES, f"oom-kill {3 * MAX_KERNEL_LINES - 1}")


def test_a_log_that_overtakes_its_reader_is_read_on(kernel, monkeypatch):
    kernel.logs(XID, 1.0)
    read, calls = os.read, []

    def overtaken_once(file, size):
        calls.append(size)
        if len(calls) == 1:
            raise BrokenPipeError
        return read(file, size)

    monkeypatch.setattr(os, "read", overtaken_once)
    assert [text for _, text in kernel.log.read_new()] == [XID]


def test_what_is_no_kernel_log_is_left_alone():
    assert KernelLog("/nowhere").read_new() is None
    assert KernelLog(os.devnull).read_new() == []


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="this user may not read the kernel's log")
def test_the_real_log_begins_with_the_boot(monkeypatch):
    monkeypatch.setattr(KernelLog, "WORDS", KernelLog.RECORD)  # all of it
    monkeypatch.setattr("llama405b_tools.agent.sampler.MAX_KERNEL_LINES", None)
    lines = KernelLog().read_new()
    booted = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
    assert booted - 5 <= lines[0][0] <= lines[-1][0] <= time.time()


def test_a_frame_has_as_many_times_as_lines(kernel, monkeypatch):
    class Smi:
        def state(self):
            return {}

    machine = Machine(Smi())
    machine.kernel = kernel.log
    kernel.logs(XID, 1.0)
    frame = machine.frame()
    assert (frame["kernel"], len(frame["kernel_times"])) == ([XID], 1)
    machine.kernel = KernelLog("/nowhere")
    assert (machine.frame()["kernel"], machine.frame()["kernel_times"]) == (None, [])
