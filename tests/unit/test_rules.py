"""Each import rule fails when it is broken; and the wheel installs nothing it should not."""

import ast
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from conftest import ROOT
from llama405b.contract.software import code_digest, code_version

LINT = Path(sys.executable).parent / "lint-imports"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    copy = tmp_path_factory.mktemp("tree")
    for part in ("llama405b", "tools"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "docs", copy / "docs")
    return copy


BREAKS = [
    ("tools/llama405b_tools/run/query.py", "import torch", "never import torch"),
    ("tools/llama405b_tools/run/screen.py", "from llama405b.optim import adamw", "never import torch"),
    (
        "tools/llama405b_tools/run/query.py",
        "from llama405b import extend",
        "Of the trainer the tools import the five",
    ),
    ("llama405b/settings/config.py", "import subprocess", "The trainer knows nothing"),
    ("llama405b/predict/hardware.py", "import numpy", "The five rooms without torch import"),
    ("tools/llama405b_tools/agent/sampler.py", "from llama405b.contract import reader", "What travels to hosts"),
    ("llama405b/data/batches.py", "from llama405b_tools import hosts", "The trainer knows nothing"),
    ("tools/llama405b_tools/hosts/inventory.py", "import pathlib", "Pure modules"),
    ("tools/llama405b_tools/launch/placement.py", "import time", "Pure modules"),
    ("tools/llama405b_tools/top/state/cluster.py", "import os", "Pure modules"),
    ("tools/llama405b_tools/verbs/stop.py", "import paramiko", "Only hosts.ssh"),
    ("tools/llama405b_tools/run/backends.py", "from llama405b_tools import plan", "The tools' rooms are layers"),
    ("tools/llama405b_tools/verbs/logs.py", "from llama405b_tools.launch import probes", "status, stop and logs"),
    ("tools/llama405b_tools/verbs/logs.py", "import libtmux", "Only run.screen"),
    ("tools/llama405b_tools/verbs/top.py", "import textual", "Only top.app"),
    (
        "tools/llama405b_tools/run/judge.py",
        "from llama405b_tools.launch import placement",
        "The tools' rooms are layers",
    ),
    (
        "tools/llama405b_tools/agent/streaming.py",
        "def f():\n    from llama405b_tools.run import query",
        "The tools' rooms are layers",
    ),
    (
        "llama405b/model/llama.py",
        "def f():\n    from llama405b.parallel import fsdp",
        "The trainer's rooms are layers",
    ),
    (
        "tools/llama405b_tools/launch/start.py",
        "def f():\n    from llama405b_tools.launch import probes",
        "No circle between siblings",
    ),
]


def lint(tree):
    env = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'tools'}", "COLUMNS": "300"}
    return subprocess.run(
        [LINT, "--no-cache"], cwd=tree, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_rules_hold(tree):
    assert lint(tree).returncode == 0


@pytest.fixture(scope="module")
def broken(tree):
    """What the linter says, rule by rule, of a tree in which every one of them is broken."""
    before = {file: (tree / file).read_text() for file, _, _ in BREAKS}
    for file, line, _ in BREAKS:
        (tree / file).write_text(f"{(tree / file).read_text()}\n{line}\n")
    done = lint(tree)
    for file, text in before.items():
        (tree / file).write_text(text)
    assert done.returncode == 1
    sections = re.split(r"\n(.+)\n-+\n", done.stdout.partition("Broken contracts")[2])
    return dict(zip(sections[1::2], sections[2::2], strict=True))


@pytest.mark.parametrize(("file", "line", "rule"), BREAKS)
def test_a_broken_rule_is_found(broken, file, line, rule):
    module = file.removeprefix("tools/").removesuffix(".py").replace("/", ".")
    [said] = [text for title, text in broken.items() if rule in title]
    imported = line.split()[-1]
    if "circle" in rule:  # its modules are named without their parents
        module, imported = f".{module.rpartition('.')[2]}", f".{imported}"
    assert re.search(rf"^\W*{re.escape(module)} -> (\S+\.)?{re.escape(imported)} ", said, re.MULTILINE), said


@pytest.mark.parametrize("verb", ["status", "stop", "logs"])
def test_what_is_asked_at_3_am_loads_little(verb):
    """It counts the modules of ours, packages too, that the verb's process has."""
    code = f"import sys, llama405b_tools.cli, llama405b_tools.verbs.{verb}; print(*sys.modules, sep=chr(10))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    ours = [name for name in loaded.split() if name.partition(".")[0] in ("llama405b", "llama405b_tools")]
    assert len(ours) <= 50, ours


@pytest.mark.slow
def test_the_wheel_has_two_packages_and_needs_no_torch(tree, tmp_path):
    (tree / ".gitignore").write_text("*private.md\n")
    (tree / "docs" / "private.md").touch()
    git = ["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all of it"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
    commit = head.stdout.strip()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, tree], check=True, timeout=300
    )
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"llama405b", "llama405b_tools"}
    assert {
        "llama405b/settings/presets/demo.toml",
        "llama405b/settings/presets/architectures.json",
        "llama405b/py.typed",
    } <= set(names)
    [metadata] = [name for name in names if name.endswith("METADATA")]
    needs = re.findall(
        r"^Requires-Dist: ([\w-]+)(?!.*extra)", zipfile.ZipFile(wheel).read(metadata).decode(), re.MULTILINE
    )
    assert {
        f"llama405b_tools/source/{name}" for name in ("constraints.txt", "docs/proof.md", "tools/wheel_files.py")
    } <= set(names)
    assert set(needs) == {
        "argcomplete",
        "libtmux",
        "msgspec",
        "paramiko",
        "prometheus-client",
        "pyyaml",
        "rich",
        "textual",
        "tomlkit",
    }
    venv.create(tmp_path / "venv")
    install = [sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python", "install", "-q", "--no-compile"]
    subprocess.run([*install, "-c", ROOT / "constraints.txt", wheel], check=True, timeout=300)
    assert not list(tmp_path.glob("venv/lib/*/site-packages/torch"))
    demo = [tmp_path / "venv/bin/cluster-top", "--replay", "demo", "--once"]
    shown = subprocess.run(demo, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"SIMULATED +llama-405b .*GPU 64/64", shown.stdout)

    copied = [tmp_path / "venv/bin/python", "-c", COPY_SOURCE, tmp_path / "source"]
    assert not [name for name in names if name.endswith("private.md")]  # git ignores it
    subprocess.run(copied, cwd=tmp_path, env={}, timeout=60, check=True)
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "docs/proof.md", "tools/wheel_files.py"):
        assert (tmp_path / "source" / name).read_bytes() == (tree / name).read_bytes(), name
    assert code_digest(tmp_path / "source") == code_digest(tree)
    ran = [tmp_path / "venv/bin/llama405b", "--version"]
    said = subprocess.run(ran, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.strip() == f"llama405b {code_version()} ({commit})"
    assert not (tmp_path / "source/COMMIT").exists()
    [page] = tmp_path.glob("venv/lib/*/site-packages/llama405b_tools/source/docs/cluster-top-json.md")
    ran = [tmp_path / "venv/bin/cluster-top", "--help"]
    said = subprocess.run(ran, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60, check=True).stdout
    assert str(page) in "".join(said.split())


COPY_SOURCE = """import sys; from pathlib import Path; from llama405b_tools.deliver.install import project_root
assert project_root(Path(sys.argv[1])) == Path(sys.argv[1])"""


def test_what_setup_makes_is_no_code():
    """It would be pushed as code otherwise: 260 MB of wheels."""
    made = [".wheelhouse/torch.whl", ".built-0123/x.whl", ".venv/bin/python", ".llama405b-code", "runs/r/plan.json"]
    done = subprocess.run(["git", "-C", ROOT, "check-ignore", *made], capture_output=True, text=True, check=False)
    assert done.stdout.split() == made


DOORS = {  # modules that are a heavy third-party package to the others: imported when they are needed
    ("llama405b/bench/open_questions.py", "llama405b.bench.busy_kernel"),
    ("tools/llama405b_tools/hosts/fleet.py", "llama405b_tools.hosts.ssh"),
    ("tools/llama405b_tools/verbs/top.py", "llama405b_tools.top.app"),
    ("tools/llama405b_tools/verbs/top.py", "llama405b_tools.top.serve"),
}


def imports_in_functions():
    for top in ("llama405b", "tools/llama405b_tools"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    for node in ast.walk(function):
                        if isinstance(node, ast.Import):
                            yield from ((str(path.relative_to(ROOT)), alias.name) for alias in node.names)
                        elif isinstance(node, ast.ImportFrom):
                            yield str(path.relative_to(ROOT)), node.module


@pytest.mark.slow
def test_what_functions_import_is_heavy():
    ours = {(file, name) for file, name in imports_in_functions() if name.startswith("llama405b")}
    assert ours == DOORS
