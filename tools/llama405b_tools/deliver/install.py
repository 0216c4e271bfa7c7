"""Install the project and one locked environment on hosts that have only sh and sshd."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llama405b.contract.errors import UserError, fmt_if, last_or
from llama405b.contract.software import INSTALLED_SOURCE, ROOT
from llama405b_tools.deliver import push, setup_plan
from llama405b_tools.deliver.chain import Origin, StepProgress
from llama405b_tools.deliver.setup_plan import FACTS_SCRIPT, SetupOptions
from llama405b_tools.deliver.source_tree import MANIFEST, SourceTree, describe_tree, push_tree
from llama405b_tools.hosts.fleet import WORKDIR, Fleet, Installation, run_streaming
from llama405b_tools.hosts.transport import Connection, HostError, Local, Stream, failure_texts, replies, shell_path
from llama405b_tools.text.words import fold_names

FACTS_TIMEOUT_S, POLL_S = 30.0, 0.1
NOISE_PREFIXES = ("WARNING: Location", "[notice]")  # what pip prints on any machine
WHEELHOUSE = ".wheelhouse"
BUILD_TOOLS = ("hatchling", "editables", "pip", "setuptools")  # what pip needs to install the project itself


def project_root(scratch: Path) -> Path:
    """Return the source tree to copy to the hosts: the checkout that this program runs from, else the one in this directory.

    An installed wheel without either makes its source tree again, in ``scratch``.

    Raises:
        UserError: There is none: the program was installed from a wheel of an earlier version.
    """
    for root in (ROOT, Path.cwd()):
        names = ("pyproject.toml", "constraints.txt", "llama405b/__init__.py")
        # What an earlier setup copied here, perhaps of another version, is no checkout; a clone that was pushed to is one.
        is_copy = root != ROOT and (root / MANIFEST).exists() and not (root / ".git").exists()
        if all((root / name).is_file() for name in names) and not is_copy:
            return root
    if not INSTALLED_SOURCE.is_dir():
        raise UserError(
            "setup: this directory is not a checkout of the project, which setup copies to the hosts; run setup in one"
        )
    ignored = shutil.ignore_patterns("__pycache__", INSTALLED_SOURCE.name, "COMMIT")
    for name, folder in (("llama405b", "."), ("llama405b_tools", "tools")):
        shutil.copytree(ROOT / name, scratch / folder / name, ignore=ignored)
    # Last: where it is read-only, so is the copy.
    shutil.copytree(INSTALLED_SOURCE, scratch, dirs_exist_ok=True, ignore=ignored)
    return scratch


def make_wheelhouse(root: Path) -> Path:
    """Fetch every wheel of the environment, for hosts with this machine's Python and architecture, unless all are there.

    Raises:
        UserError: There is no pip here, or it failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"--offline: {sys.executable} has no pip to fetch the wheels; install this program with pip")
    folder = Path(WHEELHOUSE)
    made_from = [root.joinpath(name).read_text() for name in ("pyproject.toml", "constraints.txt")]
    stamp, inputs_hash = (
        folder / ".complete",
        hashlib.sha256(json.dumps([sys.version, BUILD_TOOLS, *made_from]).encode()),
    )

    def expected_stamp() -> str:
        return "\n".join([inputs_hash.hexdigest(), *sorted(path.name for path in folder.glob("*.whl"))])

    if stamp.is_file() and stamp.read_text() == expected_stamp():
        return folder
    command = [sys.executable, "-I", "-m", "pip", "download", "--disable-pip-version-check", "-d", str(folder)]
    requirements = ["-c", str(root / "constraints.txt"), f"{root}[train]", *BUILD_TOOLS]
    print(
        f"fetching wheels into {folder}: {setup_plan.CPU_SIZE}, or {setup_plan.CUDA_SIZE} with PyTorch for CUDA",
        flush=True,
    )
    if subprocess.run([*command, *requirements], check=False).returncode:
        raise UserError("--offline: pip could not fetch the wheels; see its output above, and make it work here first")
    for project_wheel in folder.glob("llama405b-*"):  # the project itself is pushed as code
        project_wheel.unlink()
    stamp.write_text(expected_stamp())
    return folder


Planner = Callable[[Mapping[str, str], SetupOptions, str], list[setup_plan.SetupStep]]


@dataclasses.dataclass(frozen=True, slots=True)
class SetupResult:
    """Result of setup on one host."""

    installation: Installation
    summary: str  # for people


class Installer:
    """Set up the hosts in three parts; each part runs on all hosts in parallel."""

    def __init__(self, fleet: Fleet, tree: SourceTree, options: SetupOptions, wheel_python: str) -> None:
        self.fleet = fleet
        self.tree = tree
        self.options = options
        self.wheel_python = wheel_python
        self.facts: dict[str, dict[str, str]] = {}
        self.progress = StepProgress()
        self.streams: dict[str, Stream] = {}  # of the steps
        self.lost_hosts: set[str] = set()  # hosts whose connection broke during one
        self.ending = threading.Event()

    def bring_code(self, name: str) -> bool:
        """Inspect the host, and make its directory equal to the checkout."""
        connection, host = self.fleet.connection(name), self.fleet.hosts[name]
        self.facts[name] = self._read_facts(name, connection)
        workdir = host.workdir or (str(self._local_workdir()) if isinstance(connection, Local) else WORKDIR)
        summary = push_tree(connection, self.tree, workdir)
        self.progress.say(name, f"code in {workdir}: {summary}")
        python = self.options.python or "python3"
        self.fleet.hosts[name] = dataclasses.replace(host, workdir=workdir, python=python, prefix=self.options.module)
        return True

    def _local_workdir(self) -> Path:
        """Return the directory for this machine: the checkout, else this one, where later verbs look for it.

        Raises:
            HostError: Files of this directory would be overwritten.
        """
        if self.tree.root == ROOT:
            return ROOT
        here, taken = Path.cwd(), list[str]()
        if self.tree.root != here and not (here / MANIFEST).exists():
            taken = [name for name in self.tree.entries if os.path.lexists(here / name)]
        if taken:
            raise HostError(
                f"{here}/{taken[0]} would be overwritten; run setup in an empty directory, or set workdir= in the hosts file"
            )
        return here

    def _read_facts(self, name: str, connection: Connection) -> dict[str, str]:
        arguments_line = fmt_if("set -- {}\n", self.options.python and shlex.quote(self.options.python))
        result = connection.run(f"{self.options.shell_prefix}sh -s", arguments_line + FACTS_SCRIPT, FACTS_TIMEOUT_S)
        facts = setup_plan.parse_facts(result.out)
        if "arch" not in facts:
            why = last_or(result.err.strip().splitlines())[:300] or result.code
            raise HostError(f"its login shell cannot run a POSIX script ({why}); try `ssh {name} sh`")
        if missing := [program for program in ("tar", "base64", "sha256sum") if f"has_{program}" not in facts]:
            raise HostError(f"{', '.join(missing)} missing; install coreutils and tar on it")
        return facts

    def bring_wheels(self, wheels: Path, names: Sequence[str]) -> dict[str, str]:
        """Push the wheels down a chain of the hosts; returns faults, by host."""
        self.options = dataclasses.replace(self.options, offline=WHEELHOUSE)
        faults = failure_texts(self.fleet.call_each(lambda name: self.make_agent_environment(name, wheels), names))
        if targets := {name: f"{self.fleet.workdir(name)}/{WHEELHOUSE}" for name in names if name not in faults}:
            push.push_files(self.fleet, Origin("", str(wheels)), targets)
        return faults

    def make_agent_environment(self, name: str, wheels: Path) -> bool:
        """Make an environment for the agent, which receives the wheels, unless one exists."""
        connection, workdir = self.fleet.connection(name), self.fleet.workdir(name)
        if connection.run(
            f"cd {shell_path(workdir)} && {self.options.shell_prefix}{setup_plan.HAS_AGENT}", "", FACTS_TIMEOUT_S
        ).code:
            wheel = [path.name for path in wheels.glob("msgspec-*.whl")]
            push_tree(connection, describe_tree(wheels, wheel), f"{workdir}/{WHEELHOUSE}")
            self._run_steps(name, self._plan_steps(name, setup_plan.plan_agent, self.options))
        self._use_environment(name)
        return True

    def _plan_steps(self, name: str, planner: Planner, options: SetupOptions) -> list[setup_plan.SetupStep]:
        try:
            return planner(self.facts[name], options, self.wheel_python)
        except UserError as error:
            raise HostError(str(error)) from None

    def _run_steps(self, name: str, steps: Sequence[setup_plan.SetupStep]) -> str:
        last_line = ""
        for step in steps:
            last_line = self.run_step(name, step, locked="has_flock" in self.facts[name])
        return last_line

    def _use_environment(self, name: str) -> str:
        """Run the agent in the environment from now on; returns its Python."""
        line = f"cat {shell_path(self.fleet.workdir(name))}/.llama405b-python"
        python = self.fleet.connection(name).run(line, "", FACTS_TIMEOUT_S).out.strip()
        self.fleet.hosts[name] = dataclasses.replace(self.fleet.hosts[name], python=python)
        return python

    def install(self, name: str) -> SetupResult:
        """Make the environment, unless it is up to date.

        Raises:
            HostError: A step failed; says which, and what to do.
        """
        connection = self.fleet.connection(name)
        facts = self.facts[name]
        workdir = self.fleet.workdir(name)
        directory = shell_path(workdir)
        options = dataclasses.replace(self.options, stamp=self.stamp(facts, workdir))
        is_up_to_date = (
            connection.run(f"cd {directory} && {setup_plan.up_to_date_test(options)}", "", FACTS_TIMEOUT_S).code == 0
        )
        wants_cpu_build = setup_plan.has_no_gpu(facts) and not (is_up_to_date or options.offline)
        if wants_cpu_build and connection.run(setup_plan.CPU_INDEX_TEST, "", FACTS_TIMEOUT_S).code == 0:
            facts["cpu_index"] = "yes"
        steps = [
            step
            for step in self._plan_steps(name, setup_plan.plan_setup, options)
            if step.runs_always or not is_up_to_date
        ]
        version = self._run_steps(name, steps)
        python = self._use_environment(name)
        outcome = "was set up already" if is_up_to_date else "set up"
        return SetupResult(
            Installation(python, workdir, self.options.module),
            f"{outcome}: torch {version or 'as in the image'}, {python}",
        )

    def stamp(self, facts: Mapping[str, str], workdir: str) -> str:
        """Return a hash of all that the environment of a host is made from."""
        names, entries = ("constraints.txt", "pyproject.toml"), self.tree.entries
        material = [f"{entries[name].content}  ./{name}" for name in names if name in entries]
        text = json.dumps([material, dataclasses.asdict(self.options), facts.get("driver", ""), workdir])
        return hashlib.sha256(text.encode()).hexdigest()

    def run_step(self, name: str, step: setup_plan.SetupStep, *, locked: bool) -> str:
        """Run a step on a host, without a time limit while the connection holds; return its last line.

        Raises:
            HostError: It failed; says why, and what to do.
        """
        if self.ending.is_set():
            raise HostError("setup was interrupted")
        lock = "flock .llama405b-setup.lock " if locked else ""  # concurrent setups take turns
        directory = shell_path(self.fleet.workdir(name))
        line = f"cd {directory} && unset PYTHONHOME && {lock}sh -c {shlex.quote(step.line)}"
        last_line = ""
        with self.progress.track(name, step) as on_output:

            def handle_line(text: str) -> None:
                nonlocal last_line
                if not text.startswith(NOISE_PREFIXES):
                    last_line = text[-300:]
                    on_output(last_line)

            def keep_stream(stream: Stream) -> None:
                self.streams[name] = stream
                if self.ending.is_set():  # meanwhile
                    stream.end_input()

            code = run_streaming(self.fleet.connection(name), line, handle_line, keep_stream)
        if not code:
            self.lost_hosts.add(name)
        if code != "0":
            why = last_line if code else "the connection was lost"
            raise HostError(f"{step.name} failed ({why}); {step.remedy}")
        return last_line

    def interrupt(self) -> str:
        """End the running steps and wait, as a package manager finishes first; return what is known then."""
        self.ending.set()
        for step, hosts in self.progress.running_steps():
            self.progress.say(fold_names(hosts), f"ending {step}")
        for stream in list(self.streams.values()):
            stream.end_input()
        while self.progress.current_steps:
            time.sleep(POLL_S)
        lost_names = fold_names(sorted(self.lost_hosts))
        return (
            fmt_if("{}: the connection was lost, so what runs there is unknown", lost_names)
            or "nothing is left running on the hosts"
        )

    def set_up_all(self, wheels: Path | None, package: str) -> tuple[dict[str, SetupResult], dict[str, str]]:
        """Bring the code, install, and build a package, if given; returns results and faults, by host."""
        faults = failure_texts(self.fleet.call_each(self.bring_code))
        if wheels:
            faults |= self.bring_wheels(wheels, [name for name in self.fleet.hosts if name not in faults])
        outcomes = self.fleet.call_each(self.install, [name for name in self.fleet.hosts if name not in faults])
        faults |= failure_texts(outcomes)
        if package:
            faults |= self.build_and_install(package, [name for name in self.fleet.hosts if name not in faults])
        return {name: result for name, result in replies(outcomes).items() if name not in faults}, faults

    def build_and_install(self, requirement: str, names: Sequence[str]) -> dict[str, str]:
        """Compile a package on the first of these hosts, push its wheel down a chain, and install it everywhere."""
        if not names:
            return {}
        first, *others = names
        folder, make, install = setup_plan.build_package(requirement)

        def run_on(name: str, step: setup_plan.SetupStep) -> bool:
            self.run_step(name, step, locked=False)
            return True

        if fault := failure_texts(self.fleet.call_each(lambda name: run_on(name, make), [first])):
            return fault | dict.fromkeys(others, f"{requirement} could not be built on {first}")
        if others:
            targets = {name: f"{self.fleet.workdir(name)}/{folder}" for name in others}
            push.push_files(self.fleet, Origin(first, f"{self.fleet.workdir(first)}/{folder}"), targets)
        return failure_texts(self.fleet.call_each(lambda name: run_on(name, install), names))
