"""Install the project and one locked environment on hosts that have only sh and sshd."""

import dataclasses
import hashlib
import importlib.util
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import llama405b
from llama405b.contract.errors import UserError, given, last_of
from llama405b_tools.deliver import push, setup_plan
from llama405b_tools.deliver.chain import Origin, StepProgress
from llama405b_tools.deliver.setup_plan import FACTS, Wishes
from llama405b_tools.deliver.source_tree import SourceTree, push_tree, tree_of
from llama405b_tools.hosts.fleet import WORKDIR, Fleet, Use, run_streaming
from llama405b_tools.hosts.transport import Connection, HostError, Local, Stream, replies, shell_path, unanswered
from llama405b_tools.text.words import fold_names

FACTS_TIMEOUT_S, POLL_S = 30.0, 0.1
NOISE = ("WARNING: Location", "[notice]")  # what pip prints on any machine
WHEELHOUSE = ".wheelhouse"
BUILD_TOOLS = ("hatchling", "editables", "pip", "setuptools")  # what pip needs to install the project itself


def project_root() -> Path:
    """Return the checkout to copy to the hosts: the one that this program runs from, else this directory.

    Raises:
        UserError: There is none.
    """
    for root in (Path(llama405b.__file__).resolve().parent.parent, Path.cwd()):
        if all((root / name).is_file() for name in ("pyproject.toml", "constraints.txt", "llama405b/__init__.py")):
            return root
    raise UserError(
        "setup: this directory is not a checkout of the project, which setup copies to the hosts; run setup in one"
    )


def make_wheelhouse(root: Path) -> Path:
    """Fetch every wheel of the environment, for hosts with this machine's Python and architecture, unless all are there.

    Raises:
        UserError: There is no pip here, or it failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"--offline: {sys.executable} has no pip to fetch the wheels; install this program with pip")
    folder = Path(WHEELHOUSE)
    made_from = [root.joinpath(name).read_text() for name in ("pyproject.toml", "constraints.txt")]
    stamp, of = folder / ".complete", hashlib.sha256(json.dumps([sys.version, BUILD_TOOLS, *made_from]).encode())

    def complete() -> str:
        return "\n".join([of.hexdigest(), *sorted(path.name for path in folder.glob("*.whl"))])

    if stamp.is_file() and stamp.read_text() == complete():
        return folder
    command = [sys.executable, "-I", "-m", "pip", "download", "--disable-pip-version-check", "-d", str(folder)]
    what = ["-c", str(root / "constraints.txt"), f"{root}[train]", *BUILD_TOOLS]
    print(
        f"fetching wheels into {folder}: {setup_plan.CPU_SIZE}, or {setup_plan.CUDA_SIZE} with PyTorch for CUDA",
        flush=True,
    )
    if subprocess.run([*command, *what], check=False).returncode:
        raise UserError("--offline: pip could not fetch the wheels; see its output above, and make it work here first")
    for own in folder.glob("llama405b-*"):  # the project itself is pushed as code
        own.unlink()
    stamp.write_text(complete())
    return folder


Planner = Callable[[Mapping[str, str], Wishes, str], list[setup_plan.Step]]


@dataclasses.dataclass(frozen=True, slots=True)
class Installed:
    """Result of setup on one host."""

    use: Use
    said: str  # for people


class Work:
    """Set up the hosts in three parts; each part runs on all hosts in parallel."""

    def __init__(self, fleet: Fleet, tree: SourceTree, wishes: Wishes, here: str) -> None:
        self.fleet = fleet
        self.tree = tree
        self.wishes = wishes
        self.here = here
        self.facts: dict[str, dict[str, str]] = {}
        self.progress = StepProgress()
        self.streams: dict[str, Stream] = {}  # of the steps
        self.lost: set[str] = set()  # hosts whose connection broke during one
        self.ending = threading.Event()

    def bring_code(self, name: str) -> bool:
        """Inspect the host, and make its directory equal to the checkout."""
        connection, host = self.fleet.connection(name), self.fleet.hosts[name]
        self.facts[name] = self._look(name, connection)
        workdir = host.workdir or (str(self.tree.root) if isinstance(connection, Local) else WORKDIR)
        said = push_tree(connection, self.tree, workdir)
        self.progress.say(name, f"code in {workdir}: {said}")
        python = self.wishes.python or "python3"
        self.fleet.hosts[name] = dataclasses.replace(host, workdir=workdir, python=python, prefix=self.wishes.module)
        return True

    def _look(self, name: str, connection: Connection) -> dict[str, str]:
        asked = given("set -- {}\n", self.wishes.python and shlex.quote(self.wishes.python))
        said = connection.run(f"{self.wishes.before}sh -s", asked + FACTS, FACTS_TIMEOUT_S)
        facts = setup_plan.parse_facts(said.out)
        if "arch" not in facts:
            why = last_of(said.err.strip().splitlines())[:300] or said.code
            raise HostError(f"its login shell cannot run a POSIX script ({why}); try `ssh {name} sh`")
        if absent := [program for program in ("tar", "base64", "sha256sum") if f"has_{program}" not in facts]:
            raise HostError(f"{', '.join(absent)} missing; install coreutils and tar on it")
        return facts

    def bring_wheels(self, wheels: Path, names: Sequence[str]) -> dict[str, str]:
        """Push the wheels down a chain of the hosts; returns faults, by host."""
        self.wishes = dataclasses.replace(self.wishes, offline=WHEELHOUSE)
        faults = unanswered(self.fleet.each(lambda name: self.make_agent(name, wheels), names))
        if targets := {name: f"{self.fleet.workdir(name)}/{WHEELHOUSE}" for name in names if name not in faults}:
            push.push_files(self.fleet, Origin("", str(wheels)), targets)
        return faults

    def make_agent(self, name: str, wheels: Path) -> bool:
        """Make an environment for the agent, which receives the wheels, unless one exists."""
        connection, workdir = self.fleet.connection(name), self.fleet.workdir(name)
        if connection.run(
            f"cd {shell_path(workdir)} && {self.wishes.before}{setup_plan.HAS_AGENT}", "", FACTS_TIMEOUT_S
        ).code:
            wheel = [path.name for path in wheels.glob("msgspec-*.whl")]
            push_tree(connection, tree_of(wheels, wheel), f"{workdir}/{WHEELHOUSE}")
            self._take_all(name, self._planned(name, setup_plan.plan_agent, self.wishes))
        self._use_environment(name)
        return True

    def _planned(self, name: str, planner: Planner, wishes: Wishes) -> list[setup_plan.Step]:
        try:
            return planner(self.facts[name], wishes, self.here)
        except UserError as error:
            raise HostError(str(error)) from None

    def _take_all(self, name: str, steps: Sequence[setup_plan.Step]) -> str:
        last = ""
        for step in steps:
            last = self.take(name, step, locked="has_flock" in self.facts[name])
        return last

    def _use_environment(self, name: str) -> str:
        """Run the agent in the environment from now on; returns its Python."""
        line = f"cat {shell_path(self.fleet.workdir(name))}/.llama405b-python"
        python = self.fleet.connection(name).run(line, "", FACTS_TIMEOUT_S).out.strip()
        self.fleet.hosts[name] = dataclasses.replace(self.fleet.hosts[name], python=python)
        return python

    def install(self, name: str) -> Installed:
        """Make the environment, unless it is up to date.

        Raises:
            HostError: A step failed; says which, and what to do.
        """
        connection = self.fleet.connection(name)
        facts = self.facts[name]
        workdir = self.fleet.workdir(name)
        directory = shell_path(workdir)
        wishes = dataclasses.replace(self.wishes, stamp=self.stamp(facts, workdir))
        fresh = connection.run(f"cd {directory} && {setup_plan.up_to_date(wishes)}", "", FACTS_TIMEOUT_S).code == 0
        small = setup_plan.has_no_gpu(facts) and not (fresh or wishes.offline)
        if small and connection.run(setup_plan.CPU_ANSWERS, "", FACTS_TIMEOUT_S).code == 0:
            facts["cpu_index"] = "yes"
        steps = [step for step in self._planned(name, setup_plan.plan, wishes) if step.always or not fresh]
        version = self._take_all(name, steps)
        python = self._use_environment(name)
        did = "was set up already" if fresh else "set up"
        return Installed(
            Use(python, workdir, self.wishes.module), f"{did}: torch {version or 'as in the image'}, {python}"
        )

    def stamp(self, facts: Mapping[str, str], workdir: str) -> str:
        """Return a hash of all that the environment of a host is made from."""
        names, entries = ("constraints.txt", "pyproject.toml"), self.tree.entries
        material = [f"{entries[name].content}  ./{name}" for name in names if name in entries]
        text = json.dumps([material, dataclasses.asdict(self.wishes), facts.get("driver", ""), workdir])
        return hashlib.sha256(text.encode()).hexdigest()

    def take(self, name: str, step: setup_plan.Step, *, locked: bool) -> str:
        """Run a step on a host, without a time limit while the connection holds; return its last line.

        Raises:
            HostError: It failed; says why, and what to do.
        """
        if self.ending.is_set():
            raise HostError("setup was interrupted")
        lock = "flock .llama405b-setup.lock " if locked else ""  # concurrent setups take turns
        directory = shell_path(self.fleet.workdir(name))
        line = f"cd {directory} && unset PYTHONHOME && {lock}sh -c {shlex.quote(step.line)}"
        last = ""
        with self.progress.of(name, step) as seen:

            def told(text: str) -> None:
                nonlocal last
                if not text.startswith(NOISE):
                    last = text[-300:]
                    seen(last)

            def began(stream: Stream) -> None:
                self.streams[name] = stream
                if self.ending.is_set():  # meanwhile
                    stream.end_input()

            code = run_streaming(self.fleet.connection(name), line, told, began)
        if not code:
            self.lost.add(name)
        if code != "0":
            why = last if code else "the connection was lost"
            raise HostError(f"{step.name} failed ({why}); {step.remedy}")
        return last

    def end(self) -> str:
        """End the running steps and wait, as a package manager finishes first; return what is known then."""
        self.ending.set()
        for step, hosts in self.progress.running():
            self.progress.say(fold_names(hosts), f"ending {step}")
        for stream in list(self.streams.values()):
            stream.end_input()
        while self.progress.doing:
            time.sleep(POLL_S)
        lost = fold_names(sorted(self.lost))
        return (
            given("{}: the connection was lost, so what runs there is unknown", lost)
            or "nothing is left running on the hosts"
        )

    def everywhere(self, wheels: Path | None, package: str) -> tuple[dict[str, Installed], dict[str, str]]:
        """Bring the code, install, and build a package, if given; returns results and faults, by host."""
        faults = unanswered(self.fleet.each(self.bring_code))
        if wheels:
            faults |= self.bring_wheels(wheels, [name for name in self.fleet.hosts if name not in faults])
        outcomes = self.fleet.each(self.install, [name for name in self.fleet.hosts if name not in faults])
        faults |= unanswered(outcomes)
        if package:
            faults |= self.build(package, [name for name in self.fleet.hosts if name not in faults])
        return {name: made for name, made in replies(outcomes).items() if name not in faults}, faults

    def build(self, requirement: str, names: Sequence[str]) -> dict[str, str]:
        """Compile a package on the first of these hosts, push its wheel down a chain, and install it everywhere."""
        if not names:
            return {}
        first, *others = names
        folder, make, install = setup_plan.build_package(requirement)

        def on(name: str, step: setup_plan.Step) -> bool:
            self.take(name, step, locked=False)
            return True

        if fault := unanswered(self.fleet.each(lambda name: on(name, make), [first])):
            return fault | dict.fromkeys(others, f"{requirement} could not be built on {first}")
        if others:
            targets = {name: f"{self.fleet.workdir(name)}/{folder}" for name in others}
            push.push_files(self.fleet, Origin(first, f"{self.fleet.workdir(first)}/{folder}"), targets)
        return unanswered(self.fleet.each(lambda name: on(name, install), names))
