"""Break the product on purpose, one place at a time, and say whether the tests that are to see it do.

    .venv/bin/python scripts/mutations.py [random] [WORDS]

Each mutation of mutations.toml, or with ``random`` each mutant of mutants.toml that a test killed, is tried in a copy of this checkout,
with the tests that it names alone; ``WORDS``: only those whose text or tests have them. Exit code 1 if one survives, or does not apply
any more, or if its tests fail without it. The tests named in mutations.toml are those that were once longer: when one is merged,
shortened, or started with a fake trainer, this tells whether it still sees what it is for. Half an hour. Those with tests on the
stand-in need it built (``tests/standin/device/build.sh .venv/bin/python``).
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("llama405b", "tools/llama405b_tools")
LEFT_OUT = shutil.ignore_patterns(".venv*", ".standin", ".git", "__pycache__", "runs", "models")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A text that stands once in the product, what stands there instead, and the tests of which one must fail then."""

    old: str
    new: str
    tests: tuple[str, ...]


def read_mutations(name: str) -> list[Mutation]:
    """Those of a file that have tests."""
    [tables] = tomllib.loads(Path(__file__).with_name(name).read_text()).values()
    return [
        Mutation(each["old"], each["new"], tuple(f"tests/{test}" for test in each["tests"]))
        for each in tables
        if each["tests"]
    ]


def main(argv: list[str]) -> int:
    """Try the mutations, and print what became of each; returns 1 if one was not killed."""
    is_random = argv[:1] == ["random"]
    words = " ".join(argv[is_random:])
    mutations = read_mutations("mutants.toml" if is_random else "mutations.toml")
    chosen = [each for each in mutations if words in " ".join((each.old, *each.tests))]
    alive = 0
    with tempfile.TemporaryDirectory(prefix="l4mutations-") as scratch:
        copy = make_copy(scratch)
        good = {tests: run_tests(tests, copy) == 0 for tests in {each.tests for each in chosen}}
        for mutation in chosen:
            outcome, seconds = tried(mutation, copy) if good[mutation.tests] else ("FAILS WITHOUT", 0.0)
            alive += outcome != "killed"
            print(f"{outcome:14} {seconds:4.0f} s  {shown(mutation)}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} killed")
    return int(alive > 0)


def tried(mutation: Mutation, copy: Path) -> tuple[str, float]:
    """What became of a mutation, and the seconds that took."""
    began = time.monotonic()
    with mutated(copy, mutation.old, mutation.new) as applies:
        code = run_tests(mutation.tests, copy) if applies else -1
    outcomes = {0: "SURVIVED", 1: "killed", -1: "DOES NOT APPLY"}
    return outcomes.get(code, f"NOT RUN ({code})"), time.monotonic() - began


@contextlib.contextmanager
def mutated(copy: Path, old: str, new: str) -> Iterator[bool]:
    """Put the new text into a copy meanwhile; yields whether the old one stands in it once."""
    paths = [path for part in PACKAGES for path in (copy / part).rglob("*.py") if old in path.read_text()]
    before = {path: path.read_text() for path in paths}
    if [text.count(old) for text in before.values()] != [1]:
        yield False
        return
    try:
        paths[0].write_text(before[paths[0]].replace(old, new))
        yield True
    finally:
        paths[0].write_text(before[paths[0]])


def make_copy(scratch: str) -> Path:
    """Copy this checkout, with an environment of its own."""
    copy = Path(scratch) / "checkout"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    install(copy)
    return copy


def install(copy: Path) -> None:
    """Make a copy an environment in which it is what is installed, beside the packages of this one: hosts start what is."""
    venv.create(copy / ".venv", symlinks=True)
    [packages] = (copy / ".venv/lib").glob("python*/site-packages")
    (packages / "copy.pth").write_text(f"{copy}\n{copy / 'tools'}\n{sysconfig.get_path('purelib')}\n")
    for name in ("torchao", "gguf", "peft", "trackers"):  # packages that some tests alone import
        (copy / ".venv" / name).symlink_to(ROOT / ".venv" / name)
    (copy / ".standin").symlink_to(ROOT / ".standin")
    program = copy / ".venv/bin/llama405b"  # what printed commands name
    program.write_text(f"#!{copy}/.venv/bin/python\nfrom llama405b_tools.cli import main\n\nraise SystemExit(main())\n")
    program.chmod(0o755)


def run_tests(tests: tuple[str, ...], copy: Path) -> int:
    """Pytest's exit code: 1 if a test failed."""
    command = [copy / ".venv/bin/python", "-m", "pytest", "-x", "-q", "-m", "not gpu and not soak", *tests]
    environment = dict(os.environ)
    if tests[0].startswith("tests/standin/"):
        command.insert(0, copy / "tests/standin/device/run.sh")
        environment |= {"OMP_NUM_THREADS": "1", "STANDIN_CHECK": "1", "STANDIN_AGE_MS": "5000"}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False).returncode


def shown(mutation: Mutation) -> str:
    old, new = (" ".join(text.split()) for text in (mutation.old, mutation.new))
    return f"{old}  ->  {new or '(nothing)'}  ({', '.join(test.removeprefix('tests/') for test in mutation.tests)})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
