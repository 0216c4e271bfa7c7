"""A fake host that is only values, behind the seam of every connection: runs launch, guard and stop in milliseconds."""

import contextlib
import queue
import types

from llama405b.contract import reader
from llama405b.contract.records import NodeState, NodeStatus
from llama405b.contract.software import code_version
from llama405b_tools.agent import agent
from llama405b_tools.agent.evidence import HostEvidence
from llama405b_tools.agent.launch_facts import HeadRoute, LaunchFacts
from llama405b_tools.agent.machine import DirectoryCheck
from llama405b_tools.agent.messages import (
    COMMIT,
    RELEASE,
    CheckpointPart,
    Committed,
    HostRun,
    NodeUpdate,
    PartsReply,
    StartReply,
    StatusReply,
    StopReply,
    StreamMessage,
)
from llama405b_tools.hosts import calls
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.transport import CommandResult, HostError
from llama405b_tools.parsers import Rdma
from llama405b_tools.run.diagnosis import LOAD_COMMAND


class FakeHost:
    """Answers as an agent does. ``faults``: by action, what it says instead (a text, or the error that is raised)."""

    def __init__(self, name):
        self.name, self.plan, self.alive, self.node_status, self.stopped_by = name, None, False, None, ""
        self.saved = ()  # steps of the checkpoints here
        self.checkpoint, self.faults, self.heard, self.blames = None, {}, [], ()
        self.members, self.ends, self.now, self.noted = (), (), 0.0, None
        self.machine, self.stopped_at, self.unsaved = name, 0.0, ""
        self.seen = None  # what an autopsy sees here
        self.load, self.waits = "0.50 0.40 0.30 1/99 7\n2\n", {}  # and by action, how long it was waited for
        self.lives = []  # how each launch of it goes: a list of StreamMessage, then it is over
        self.disks = ()  # the answer to a guard's note
        self.gpus = [0]  # as each probe finds them; the last number stays

    def answer(self, action, stdin):
        """The lines that an agent prints when this function is called."""
        function = agent.load_function(action)
        arguments = calls.decode_arguments(function, stdin)
        self.heard.append(
            (action, arguments["request"] if [*arguments] == ["request"] else types.SimpleNamespace(**arguments))
        )
        fault = self.faults.get(action)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            return [fault]
        result = getattr(self, action)(**arguments)
        return (
            [reader.dumps(each) for each in result]
            if calls.prints_messages(function)
            else [calls.encode_result(result)]
        )

    def probe(self, request):
        head = {address: HeadRoute("", "10.0.0.9", "eth0") for address in request.candidates}
        alive = self.alive and request.run == self.plan.run
        gpus = self.gpus.pop(0) if len(self.gpus) > 1 else self.gpus[0]
        return LaunchFacts({}, True, "", True, False, self.plan.attempt if self.plan else 0, "", alive, (), (), self.machine,
                          gpus, Rdma(), 2, "", False, (), head, "/w", DirectoryCheck("/w/runs/r"), {}, 1 << 40, None, "",
                          stopped_by=self.stopped_by, stopped_at=self.stopped_at)  # fmt: skip

    def start(self, request):
        self.plan, self.alive = request.plan, True
        self.noted = self.noted if request.again else request.guard
        self.node_status = NodeStatus(self.name, NodeState.RUNNING, request.plan.attempt, 1, 1)
        yield StartReply()

    def probe_head(self, request):
        yield self.probe(request)

    def planned(self, run):
        return self.plan

    def account_of(self, run, host):
        return None

    def evidence(self, run, host, window_s):
        return self.seen or HostEvidence(self.name, self.now)

    def parts(self, run):
        return PartsReply("/c", tuple(CheckpointPart(step, "", "", (), ()) for step in self.saved))

    def note(self, run, host, only, state):
        self.noted = state
        return self.disks

    def keep(self):
        return [reader.dumps(Committed())]

    def hang_up(self):
        self.alive = False

    def tether(self, run, host):
        return ()

    def stop(self, run, host, *, by, blame, **options):
        was, self.alive = self.alive, False
        self.stopped_by = by or self.stopped_by
        if blame:
            self.blames = (*self.blames, blame)
        return StopReply(self.plan is not None, was, stopped_by=self.stopped_by, node=self.run() if self.plan else None)

    def status(self, host, run):
        return self.status_reply(run)

    def status_reply(self, named):
        return StatusReply((self.run(),) if self.plan and named in (None, self.plan.run) else ())

    def run(self):
        plan = self.plan
        return HostRun(plan.run, plan.created, plan.attempt, "", 0, self.alive, (), self.node_status, (), self.ends,
                       self.stopped_by, None, self.checkpoint, self.now,
                       self.members or tuple(node.name for node in plan.nodes), self.noted, self.blames,
                       unsaved=self.unsaved)  # fmt: skip

    def stream(self, request):
        for news in self.lives.pop(0) if self.lives else ():
            if news.node:
                self.alive, self.node_status, self.stopped_by = news.node.alive, news.node.status, news.node.stopped_by
            yield news
        yield StreamMessage(end=True)


def over(host, cause=None, *, code=1, stopped_by=""):
    """The news that a host's part of a run has ended."""
    status = NodeStatus(host, NodeState.EXITED, 1, 1, 1, exit_code=code if cause else 0, cause=cause)
    return StreamMessage(node=NodeUpdate(False, status, stopped_by))


class FakeConnection:
    """``transport.Connection`` to a ``FakeHost``."""

    def __init__(self, host):
        self.host = host

    def run(self, command, stdin, timeout_s):
        self.host.waits[command.rpartition(" ")[2]] = timeout_s
        if command == LOAD_COMMAND:
            return CommandResult(0, self.host.load, "")
        if command == "true":
            if isinstance(fault := self.host.faults.get("true"), Exception):
                raise fault
            return CommandResult(0, "", "")
        if command.endswith(" --version"):
            return CommandResult(0, f"llama405b {code_version()}\n", "")
        answer = self.host.answer(command.rpartition(" ")[2], stdin)
        return CommandResult(0, "\n".join(answer) + "\n", "")

    def stream(self, command, stdin):
        return FakeStream(self.host, command.rpartition(" ")[2], stdin)

    def is_open(self):
        return True

    def close(self):
        pass


class FakeStream:
    def __init__(self, host, action, stdin):
        self.host, self.action, self.kept, self.lines = host, action, False, queue.Queue()
        for line in host.answer(action, stdin):
            self.lines.put(line)
        if action == "stream":
            self.lines.put(None)

    def __iter__(self):
        while (line := self.lines.get()) is not None:
            yield line

    def send(self, text):
        if isinstance(fault := self.host.faults.get("keep"), BaseException):
            raise fault
        self.kept = text in (COMMIT, RELEASE)
        for line in self.host.keep() if text == COMMIT else ():
            self.lines.put(line)

    def end_input(self):
        if self.action in ("start", "tether") and not self.kept:
            self.host.hang_up()
        self.lines.put(None)

    close = end_input


class FakeFleet(Fleet):
    """A fleet of them; a connection that broke is made again."""

    def __init__(self, names):
        super().__init__(Host(name, f"hosts:{i}", workdir="/w", python="/py") for i, name in enumerate(names, 1))
        self.fakes = {name: FakeHost(name) for name in names}

    def connection(self, name):
        if isinstance(fault := self.fakes[name].faults.get("connect"), HostError):
            raise fault
        return FakeConnection(self.fakes[name])

    def forget(self, name, *, unless_open=False):
        pass


@contextlib.contextmanager
def running_fleet(names, plan):
    """A fleet on which a run is alive."""
    with FakeFleet(names) as found:
        for host in found.fakes.values():
            host.plan, host.alive = plan, True
        yield found
