"""What setup does on a host, as shell lines. Pure: facts in, steps out. The host has sh, and nothing of ours."""

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Mapping

from llama405b.contract.errors import UserError

UV_PYTHON = "3.12"
LEAST_PYTHON = (3, 11)
TORCH_INDEX = "https://download.pytorch.org/whl"
CUDA_BUILDS = (
    (580, "cu130"),
    (570, "cu128"),
    (560, "cu126"),
)  # least driver branch -> torch's build (CUDA release notes)
STAMP = ".venv/.set-up"
FACTS = r"""
say() { printf '%s=%s\n' "$1" "$2"; }
say arch "$(uname -m)"; say uid "$(id -u)"; say system "$(. /etc/os-release 2>/dev/null; echo "$ID $VERSION_ID")"
for p in tmux ip tar base64 sha256sum flock apt-get dnf apptainer conda; do command -v $p >/dev/null 2>&1 && say has_$p yes; done
sudo -n true >/dev/null 2>&1 && say sudo yes
PY=${1:-python3}
command -v "$PY" >/dev/null 2>&1 && say python "$("$PY" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)"
"$PY" -c 'import ensurepip, venv' >/dev/null 2>&1 && say venv yes
say driver "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1)"
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line asks for."""

    python: str = ""  # to build the environment from
    conda: str = ""  # an environment to install into
    module: str = ""  # a shell line that goes before everything
    container: str = ""  # an image that apptainer runs
    offline: str = ""  # the wheelhouse, below the working directory
    torch_index: str = "auto"
    stamp: str = ""  # changes with whatever the environment is made from


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One thing to do on a host."""

    name: str  # in the progress: "installing packages"
    line: str  # shell, in the working directory
    remedy: str  # where it fails
    always: bool = False  # also where everything is set up already


def parse_facts(text: str) -> dict[str, str]:
    """What ``FACTS`` printed."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def plan(facts: Mapping[str, str], wishes: Wishes, wheel_python: str) -> list[Step]:
    """The steps for a host; ``wheel_python``: what the wheelhouse was made for, like ``3.11 x86_64``.

    Raises:
        UserError: What is asked for cannot be had on this host; says why, without the host's name.
    """
    steps = _programs(facts)
    before = f"{wishes.module} && " if wishes.module else ""
    if wishes.container:
        return [*steps, _container(facts, wishes)]
    make, install = _environment(facts, wishes)
    where = _index(facts, wishes)
    python = '"$(cat .llama405b-python)"'
    if wishes.offline:
        found = f"{facts.get('python', 'none')} {facts['arch']}"
        if wheel_python != found and not wishes.conda:
            raise UserError(
                f"--offline: the wheels are for Python {wheel_python}, but it has {found}; leave --offline out, or "
                "name an equal Python with --python"
            )
        where = f"--no-index --find-links {shlex.quote(wishes.offline)} "
    done = f"mkdir -p .venv && printf %s {shlex.quote(wishes.stamp)} >{STAMP}.new && mv {STAMP}.new {STAMP}"
    if wishes.conda:
        steps.append(
            Step("finding the conda environment", f"{before}{make}", "name an environment of `conda env list`")
        )
    else:
        steps.append(
            Step("making .venv", f"{before}{{ {make}; }}", "look at what it said; with --python you choose another")
        )
    steps.append(
        Step(
            "installing packages",
            f"{before}{install.format(python=python)}{where}-c constraints.txt -e '.[train]' && {done}",
            "look at what it said; with --offline no network is needed",
        )
    )
    tried = 'import llama405b_tools.remote.agent, importlib.metadata as m; print(m.version("torch"))'
    check = f"{before}PYTHONPATH=tools {python} -c {shlex.quote(tried)}"
    steps.append(Step("checking", check, "delete .venv there, and run setup again", always=True))
    return steps


def build(requirement: str) -> tuple[str, Step, Step]:
    """A package that has to be compiled: the wheel's directory, the step that makes it once, and the one that installs it.

    It is compiled against the torch of the environment, so without pip's isolation.
    """
    folder = f".built-{hashlib.sha256(requirement.encode()).hexdigest()[:12]}"
    pip = '"$(cat .llama405b-python)" -m pip'
    wheel = f"{pip} wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w {folder}.new "
    fresh = f"rm -rf {folder}.new && {wheel}{shlex.quote(requirement)} && mv {folder}.new {folder}"
    make = f"ls {folder}/*.whl >/dev/null 2>&1 || {{ {fresh}; }}"
    install = f"{pip} install -q --disable-pip-version-check --no-deps --no-index {folder}/*.whl"
    return (
        folder,
        Step(f"building {requirement}", make, "look at what it said: a compiler and CUDA's nvcc are needed there"),
        Step(f"installing {requirement}", install, "its wheel is for the Python and torch of the first host"),
    )


def up_to_date(wishes: Wishes) -> str:
    """A shell line that succeeds where nothing is to be done."""
    return f'[ "$(cat {STAMP} 2>/dev/null)" = {shlex.quote(wishes.stamp)} ] && [ -x "$(cat .llama405b-python)" ]'


def _programs(facts: Mapping[str, str]) -> list[Step]:
    missing = [package for program, package in (("tmux", "tmux"), ("ip", "iproute2")) if f"has_{program}" not in facts]
    if not missing:
        return []
    names = " ".join(missing)
    as_root = "sudo -n " if "sudo" in facts else None
    if facts.get("uid") == "0":
        as_root = ""
    if as_root is None or not {"has_apt-get", "has_dnf"} & set(facts):
        raise UserError(f"{names} missing, and this user may not install; type there: sudo apt-get install -y {names}")
    if "has_apt-get" in facts:
        line = (
            f"{as_root}apt-get update -qq && {as_root}env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq {names}"
        )
    else:
        line = f"{as_root}dnf install -y -q {names.replace('iproute2', 'iproute')}"
    return [Step(f"installing {names}", line, f"install {names} there by hand", always=True)]


def _environment(facts: Mapping[str, str], wishes: Wishes) -> tuple[str, str]:
    """How the environment is made, and how pip is called in it (with ``{python}``)."""
    pip = "{python} -m pip install -q --disable-pip-version-check "
    if wishes.conda:
        name = shlex.quote(wishes.conda)
        return f"conda run -n {name} sh -c 'command -v python' >.llama405b-python", pip
    found = re.fullmatch(r"(\d+)\.(\d+)", facts.get("python", ""))
    new_enough = bool(found) and (int(found[1]), int(found[2])) >= LEAST_PYTHON  # type: ignore[index]
    source = shlex.quote(wishes.python or "python3")
    note = 'echo "$PWD/.venv/bin/python" >.llama405b-python'
    if wishes.python and not new_enough:
        raise UserError(f"--python: {wishes.python} is {facts.get('python') or 'not there'}; at least 3.11 is needed")
    if new_enough and "venv" in facts:
        return f"{{ [ -x .venv/bin/pip ] || {source} -m venv --clear .venv; }} && {note}", pip
    version = source if new_enough else UV_PYTHON
    fetch = 'curl -LsSf https://astral.sh/uv/install.sh | env UV_UNMANAGED_INSTALL="$PWD/.uv" sh'
    get = f"{{ command -v uv >/dev/null || [ -x .uv/uv ] || {fetch}; }}"
    make = f"{get} && PATH=$PWD/.uv:$PATH uv venv -q --allow-existing --seed --python {version} .venv && {note}"
    return make, pip


def _index(facts: Mapping[str, str], wishes: Wishes) -> str:
    """Where torch comes from: the build that fits the driver."""
    if wishes.torch_index == "none":
        return ""
    if wishes.torch_index != "auto":
        return f"--extra-index-url {shlex.quote(wishes.torch_index)} "
    driver = re.match(r"(\d+)", facts.get("driver", ""))
    if not driver:
        return ""
    for least, build in CUDA_BUILDS:
        if int(driver[1]) >= least:
            return f"--extra-index-url {TORCH_INDEX}/{build} "
    raise UserError(
        f"driver {facts['driver']} is too old for any build of torch; install {CUDA_BUILDS[-1][0]} or newer"
    )


def _container(facts: Mapping[str, str], wishes: Wishes) -> Step:
    """A python that runs inside the image. apptainer keeps the processes ours; docker would hand them to its daemon."""
    if "has_apptainer" not in facts:
        raise UserError("--container: there is no apptainer; install it there, or take --python or --conda")
    image = shlex.quote(wishes.container)
    wrapper = f'#!/bin/sh\\nexec apptainer exec --nv --bind "$PWD" {image} python3 "$@"\\n'
    line = (
        f"mkdir -p .venv/bin && printf '{wrapper}' >.venv/bin/python && chmod +x .venv/bin/python "
        '&& echo "$PWD/.venv/bin/python" >.llama405b-python '
        '&& PYTHONPATH=tools .venv/bin/python -c "import torch, llama405b_tools.remote.agent"'
        f" && printf %s {shlex.quote(wishes.stamp)} >{STAMP}"
    )
    return Step("trying the image", line, "the image needs python3 >= 3.11 with torch and transformers")
