"""Plan the shell steps of setup on a host from its facts. Pure. The host has sh and none of our code."""

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Mapping

from llama405b.contract.errors import UserError, fmt_if
from llama405b_tools.hosts.transport import module_line
from llama405b_tools.launch.findings import PROGRAMS

UV_PYTHON = "3.12"
MIN_PYTHON = (3, 11)
TORCH_INDEX = "https://download.pytorch.org/whl"
# least driver branch -> torch's build (CUDA release notes)
CUDA_BUILDS = ((580, "cu130"), (570, "cu128"), (560, "cu126"))
STAMP = ".venv/.set-up"
PYTHON = '"$(cat .llama405b-python)"'
INSTALL = f"{PYTHON} -I -m pip install --disable-pip-version-check --no-compile"
COMPILE = f"{PYTHON} -I -c 'import llama405b.train'"  # what is needed; pip takes longer over all
HAS_AGENT = f"{PYTHON} -I -c 'import msgspec'"  # all that it needs
CPU_INDEX_FETCH = f"import urllib.request as u; u.urlopen('{TORCH_INDEX}/cpu/torch/', timeout=10)"
CPU_INDEX_TEST = f'curl -fsI -m 10 {TORCH_INDEX}/cpu/torch/ >/dev/null 2>&1 || timeout 15 python3 -I -c "{CPU_INDEX_FETCH}" 2>/dev/null'
# `apt-get update` does not wait for its lock
APT_IS_FREE = (
    "s=0; while inode=$(stat -c %i /var/lib/apt/lists/lock 2>/dev/null) && "
    'grep -qs ":$inode " /proc/locks && [ $s -lt 600 ]; '
    "do echo waiting for another apt to finish; s=$((s + 2)); sleep 2; done"
)
UNINTERRUPTED = "trap '' TERM; "  # a package manager that is cut off leaves the system's packages half installed
FACTS_SCRIPT = r"""
say() { printf '%s=%s\n' "$1" "$2"; }
say arch "$(uname -m)"; say uid "$(id -u)"; say system "$(. /etc/os-release 2>/dev/null; echo "$ID $VERSION_ID")"
for p in tmux ip tar base64 sha256sum flock apt-get dnf apptainer conda; do command -v $p >/dev/null 2>&1 && say has_$p yes; done
sudo -n true >/dev/null 2>&1 && say sudo yes
PY=${1:-python3}
command -v "$PY" >/dev/null 2>&1 && say python "$("$PY" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)"
"$PY" -I -c 'import ensurepip, venv' >/dev/null 2>&1 && say venv yes
{ [ -e /dev/nvidiactl ] || grep -qs 0x10de /sys/bus/pci/devices/*/vendor; } && say gpu yes
say driver "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1)"
"""


@dataclasses.dataclass(frozen=True, slots=True)
class PackageSize:
    """Size of all packages, in GB (at the versions in constraints.txt)."""

    download: float
    unpacked: float

    def __str__(self) -> str:
        """Return what is downloaded, for people."""
        return f"{self.download} GB"


CPU_SIZE, CUDA_SIZE = PackageSize(0.3, 1.2), PackageSize(2.7, 4.9)


@dataclasses.dataclass(frozen=True, slots=True)
class SetupOptions:
    """Options from the command line."""

    python: str = ""  # to build the environment from
    conda: str = ""  # an environment to install into
    module: str = ""  # a shell line that runs before everything else
    container: str = ""  # an image for apptainer
    offline: str = ""  # the wheelhouse, below the working directory
    torch_index: str = "auto"
    stamp: str = ""  # changes with the environment's inputs

    @property
    def shell_prefix(self) -> str:
        """Prefix of every shell line."""
        return fmt_if("{} && ", self.module)


@dataclasses.dataclass(frozen=True, slots=True)
class SetupStep:
    """One thing to do on a host."""

    name: str  # in the progress: "installing packages"
    line: str  # shell, in the working directory
    remedy: str  # if it fails
    download: str = ""  # what it downloads
    runs_always: bool = False  # even if everything is set up already


def parse_facts(text: str) -> dict[str, str]:
    """Parse the output of ``FACTS_SCRIPT``."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def plan_setup(facts: Mapping[str, str], options: SetupOptions, wheel_python: str) -> list[SetupStep]:
    """Plan the steps for a host; ``wheel_python``: what the wheelhouse was made for, like ``3.11 x86_64``."""
    programs = _program_steps(facts)
    if options.container:
        return [*programs, _container_step(facts, options)]
    environment = _environment_step(facts, options)
    index_options, download, size = _index_options(facts, options)
    size_arguments = f"{size.download} {size.unpacked}"
    if options.offline:
        index_options = _wheel_options(facts, options, wheel_python)
        download = ""
        size_arguments = shlex.quote(options.offline)
    write_stamp = f"mkdir -p .venv && printf %s {shlex.quote(options.stamp)} >{STAMP}.new && mv {STAMP}.new {STAMP}"
    install = (
        f"{options.shell_prefix}{INSTALL} {index_options}-c constraints.txt -e '.[train]' && {COMPILE} && {write_stamp}"
    )
    check_room = f"{options.shell_prefix}{module_line(PYTHON, 'llama405b_tools.agent.venv_room')} {size_arguments}"
    import_test = 'import llama405b_tools.agent.agent, importlib.metadata as m; print(m.version("torch"))'
    check = f"{options.shell_prefix}{PYTHON} -I -c {shlex.quote(import_test)}"
    return [
        *programs,
        environment,
        SetupStep("checking the disk", check_room, "make room there, or set workdir= on a larger disk"),
        SetupStep("installing packages", install, "fix that; if the host has no network, use --offline", download),
        SetupStep("checking", check, "delete .venv on it, and run setup again", runs_always=True),
    ]


def plan_agent(facts: Mapping[str, str], options: SetupOptions, wheel_python: str) -> list[SetupStep]:
    """Plan an environment for the agent alone, which then receives the wheels of all other packages."""
    install = (
        f"{options.shell_prefix}{INSTALL} {_wheel_options(facts, options, wheel_python)}-c constraints.txt msgspec"
    )
    return [
        _environment_step(facts, options),
        SetupStep("installing msgspec", install, "delete .venv on it, and run setup again"),
    ]


def build_package(requirement: str) -> tuple[str, SetupStep, SetupStep]:
    """Plan a compiled package: the wheel's directory, the step that builds it, and the one that installs it.

    It is compiled against the environment's torch, so without pip's build isolation.
    """
    folder = f".built-{hashlib.sha256(requirement.encode()).hexdigest()[:12]}"
    wheel = f"{PYTHON} -I -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation -w {folder}.new "
    build = f"rm -rf {folder}.new && {wheel}{shlex.quote(requirement)} && mv {folder}.new {folder}"
    line = f"ls {folder}/*.whl >/dev/null 2>&1 || {{ {build}; }}"
    make = SetupStep(f"building {requirement}", line, "fix that; building needs a compiler and CUDA's nvcc")
    line = f"{INSTALL} --no-deps --no-index {folder}/*.whl"
    return (
        folder,
        make,
        SetupStep(f"installing {requirement}", line, "its wheel needs the same Python and torch as the first host"),
    )


def up_to_date_test(options: SetupOptions) -> str:
    """Return a shell line that succeeds if there is nothing to do."""
    return f'[ "$(cat {STAMP} 2>/dev/null)" = {shlex.quote(options.stamp)} ] && [ -x "$(cat .llama405b-python)" ]'


def _program_steps(facts: Mapping[str, str]) -> list[SetupStep]:
    missing = [package for program, package in PROGRAMS.items() if f"has_{program}" not in facts]
    if not missing:
        return []
    names = " ".join(missing)
    dnf = f"dnf install -y {names.replace('iproute2', 'iproute')}"
    by_hand = {"has_apt-get": f"apt-get update && apt-get install -y {names}", "has_dnf": dnf}
    commands = [command for program, command in by_hand.items() if program in facts]
    if not commands:
        raise UserError(f"{names} missing; install them on it with its package manager")
    as_root = "" if facts.get("uid") == "0" else "sudo -n "
    if as_root and "sudo" not in facts:
        raise UserError(f"{names} missing, and this user cannot install; run there as root: {commands[0]}")
    line = f"{UNINTERRUPTED}{as_root}{dnf}"
    if "has_apt-get" in facts:
        options = "DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600"
        line = f"{APT_IS_FREE}; {UNINTERRUPTED}{as_root}apt-get update -qq && {as_root}env {options} install -y -qq {names}"
    return [SetupStep(f"installing {names}", line, f"install {names} on it by hand", runs_always=True)]


def _environment_step(facts: Mapping[str, str], options: SetupOptions) -> SetupStep:
    """Return the step that makes the environment."""
    if options.conda:
        find = f"conda run -n {shlex.quote(options.conda)} sh -c 'command -v python' >.llama405b-python"
        remedy = "use one that `conda env list` shows"
        return SetupStep("finding the conda environment", f"{options.shell_prefix}{find}", remedy)
    match = re.fullmatch(r"(\d+)\.(\d+)", facts.get("python", ""))
    new_enough = match is not None and (int(match[1]), int(match[2])) >= MIN_PYTHON
    if options.python and not new_enough:
        raise UserError(f"--python: {options.python} is {facts.get('python') or 'missing'}; use 3.11 or newer")
    source = shlex.quote(options.python or "python3")
    if new_enough and "venv" in facts:
        make = f"{{ [ -x .venv/bin/pip ] || {source} -m venv --clear .venv; }}"
    else:
        version = source if new_enough else UV_PYTHON
        fetch = 'curl -LsSf https://astral.sh/uv/install.sh | env UV_UNMANAGED_INSTALL="$PWD/.uv" sh'
        get = f"{{ command -v uv >/dev/null || [ -x .uv/uv ] || {fetch}; }}"
        make = f"{get} && PATH=$PWD/.uv:$PATH uv venv -q --allow-existing --seed --python {version} .venv"
    line = f'{options.shell_prefix}{{ {make} && echo "$PWD/.venv/bin/python" >.llama405b-python; }}'
    return SetupStep("making .venv", line, "fix that, or choose another Python with --python")


def _wheel_options(facts: Mapping[str, str], options: SetupOptions, wheel_python: str) -> str:
    """Return the options that point pip at the wheelhouse."""
    host_python = f"{facts.get('python', 'none')} {facts['arch']}"
    if wheel_python != host_python and not options.conda:
        mismatch = f"the wheels are for Python {wheel_python}, but it has {host_python}"
        raise UserError(f"--offline: {mismatch}; omit --offline, or name a matching Python with --python")
    return f"--no-index --find-links {shlex.quote(options.offline)} "


def has_no_gpu(facts: Mapping[str, str]) -> bool:
    """Return whether there is neither a GPU nor a driver for one."""
    return "gpu" not in facts and not facts.get("driver")


def _index_options(facts: Mapping[str, str], options: SetupOptions) -> tuple[str, str, PackageSize]:
    """Return pip's option for the torch build that fits the driver, what it downloads, and the minimum size."""
    if options.torch_index == "none":
        return "", "", CPU_SIZE
    if options.torch_index != "auto":
        return f"--extra-index-url {shlex.quote(options.torch_index)} ", "", CPU_SIZE
    if has_no_gpu(facts) and "cpu_index" in facts:
        return f"--extra-index-url {TORCH_INDEX}/cpu ", f"PyTorch for CPU: {CPU_SIZE} to download", CPU_SIZE
    driver = re.match(r"(\d+)", facts.get("driver", ""))
    if not driver:
        return "", f"{CPU_SIZE} to download; {CUDA_SIZE} if pip finds only PyTorch for CUDA", CPU_SIZE
    for min_driver, build in CUDA_BUILDS:
        if int(driver[1]) >= min_driver:
            download = f"PyTorch for CUDA: {CUDA_SIZE} to download"
            return f"--extra-index-url {TORCH_INDEX}/{build} ", download, CUDA_SIZE
    min_driver, _ = CUDA_BUILDS[-1]
    raise UserError(f"driver {facts['driver']} is too old for any build of torch; install {min_driver} or newer")


def _container_step(facts: Mapping[str, str], options: SetupOptions) -> SetupStep:
    """Return the step that makes a python that runs inside the image.

    With apptainer the processes are our children; docker would run them in its daemon.
    """
    if "has_apptainer" not in facts:
        raise UserError("--container: apptainer is missing; install it, or use --python or --conda")
    image = shlex.quote(options.container)
    wrapper = f'#!/bin/sh\\nexec apptainer exec --nv --bind "$PWD" {image} python3 "$@"\\n'
    line = (
        f"mkdir -p .venv/bin && printf '{wrapper}' >.venv/bin/python && chmod +x .venv/bin/python "
        '&& echo "$PWD/.venv/bin/python" >.llama405b-python '
        "&& .venv/bin/python -I -c \"import sys; sys.path += ['.', 'tools']; import torch, llama405b_tools.agent.agent\""
        f" && printf %s {shlex.quote(options.stamp)} >{STAMP}"
    )
    return SetupStep("trying the image", line, "the image needs python3 >= 3.11 with torch, transformers and msgspec")
