"""Run the tests that are new since a commit against the code of that commit, and list those that pass there.

    .venv/bin/python scripts/against.py COMMIT [PYTEST ARGS]

A test kept with a mend must fail without it: any that is listed proves nothing about what changed since. Exit code 1 if
there is one. Tests whose id existed before are not run, even if they were changed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main(commit: str, more: Sequence[str]) -> int:
    """List the new tests that pass on the old code; returns 1 if there are any."""
    with tempfile.TemporaryDirectory() as scratch:
        old = Path(scratch) / "old"
        git("worktree", "add", "--quiet", "--detach", str(old), commit)
        try:
            known = collected(old)
            shutil.rmtree(old / "tests")
            shutil.copytree(ROOT / "tests", old / "tests", ignore=shutil.ignore_patterns("__pycache__"))
            new = sorted(collected(ROOT, *more) - known)
            passed = sorted(passing(old, new))
        finally:
            git("worktree", "remove", "--force", str(old))
    print(f"{len(new)} tests are new since {commit}; {len(passed)} of them pass there")
    print("\n".join(passed))
    return int(bool(passed))


def collected(root: Path, *more: str) -> set[str]:
    """The ids of the tests of a checkout."""
    found = pytest(root, "--collect-only", "-q", *more)
    return {line for line in found.splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))}


def passing(root: Path, tests: Sequence[str]) -> set[str]:
    """The ids of those that pass, run file by file: one that cannot be imported does not hide the others."""
    found = set()
    for file in sorted({test.split("::")[0] for test in tests}):
        report = root / "report.xml"
        report.unlink(missing_ok=True)
        mine = [test for test in tests if test.startswith(f"{file}::")]
        (root / "ids").write_text("\n".join(mine))
        pytest(root, "-q", f"--junitxml={report}", "-o", "junit_family=xunit1", "@ids")
        if report.exists():
            cases = ElementTree.parse(report).iter("testcase")
            found |= {f"{case.get('file')}::{case.get('name')}" for case in cases if not list(case)}
    return found


def pytest(root: Path, *arguments: str) -> str:
    """What pytest prints, run on the code of a checkout."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    path = f"{root}:{root / 'tools'}"
    return subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    ).stdout


def git(*arguments: str) -> None:
    """Run git in this checkout."""
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
