"""Take out, one at a time, what makes the trainer wait for the device, and say whether the tests on the stand-in find it.

    .venv/bin/python scripts/removed_waits.py [WORDS]

A wait is a call of ``wait_event``, ``wait_stream``, ``record_stream``, ``synchronize`` or a ``Work``'s ``wait``, or of what
``async_copy`` gave back (a ``WaitForCopy``), found by the code's syntax in llama405b/. ``WORDS``: only those whose file or code has
them. Each is taken out in a copy of this checkout, and the tests named here for its file run with the stand-in's checks. Prints a table;
docs/measurements/standin.md keeps it. Exit code 1 if one is not found, and no comment on its line says why it stays. A quarter of an
hour.
"""

import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mutations import LEFT_OUT, ROOT, install

METHODS = ("wait_event", "wait_stream", "record_stream", "synchronize")
# Whose ``wait`` is not for the device.
OTHERS = ("self", "updater", "self.updater", "concurrent.futures", "self.condition", "self.end_requested")
ARRIVED = "WaitForCopy"  # the type of what waits for copies, as annotations name it
MISSED = "NOT FOUND"
NOTHING = "(lambda *_, **__: None)"
LOSSES = "tests/standin/test_losses.py"
TESTS = {  # by the file's name: what can see its waits
    "offload": ("tests/standin/test_order.py", LOSSES, "-k", "all or weights_go_up or optimizer"),
    "copy_on_update": ("tests/standin/test_order.py", LOSSES, "-k", "order or none"),
    "fsdp": (LOSSES, "-k", "none"),
    "load_weights": ("tests/standin/test_runs.py", "-k", "streams"),
    "host_memory": (
        "tests/standin/test_runs.py",
        "tests/standin/test_counts.py",
        LOSSES,
        "-k",
        "streams or optimizer or count",
    ),
    "host": ("tests/standin/test_ladder.py",),
}
RAISED = re.compile(r"^E +(\w+Error: .*)", re.MULTILINE)
REPORTED = re.compile(r"\[standin\] (touched|changed|race):")


@dataclasses.dataclass(frozen=True)
class Wait:
    """A place in a file: the function that is called, or given to be called."""

    path: Path
    function: str
    begin: int  # bytes of the file
    end: int
    code: str
    comment: str  # on its line

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT / 'llama405b')} | `{self.function}` | `{self.code}`"


def main(words: str) -> int:
    """Try them, and print what became of each."""
    missed = 0
    chosen = [
        wait
        for path in sorted((ROOT / "llama405b").rglob("*.py"))
        for wait in waits(path)
        if words in str(wait).replace("`", "")
    ]
    with tempfile.TemporaryDirectory(prefix="l4waits-") as scratch:
        copy = Path(scratch) / "checkout"
        shutil.copytree(ROOT, copy, ignore=lambda *of: {*LEFT_OUT(*of), ".standin"} & {*of[1]})
        (copy / ".standin").symlink_to(ROOT / ".standin")
        install(copy)
        good = {tests: run_tests(tests, copy)[0] == 0 for tests in {tests_of(wait) for wait in chosen}}
        for wait in chosen:
            outcome, seconds = tried(wait, copy) if good[tests_of(wait)] else ("FAILS WITH IT", 0.0)
            missed += not outcome.startswith(("found: ", "not found: "))
            print(f"| {wait} | {outcome} | {seconds:.0f} s |", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found or explained")
    return int(missed > 0)


def waits(path: Path) -> Iterator[Wait]:
    """Yield those of one file."""
    text = path.read_bytes()
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    arrived = names_of_arrived(tree)
    for node in ast.walk(tree):
        callee = node.func if isinstance(node, ast.Call) else None
        if callee is not None and (is_method(callee) or is_arrived(callee, arrived)):
            node_at = callee
        elif isinstance(node, ast.Return) and is_method(returned := first_value(node.value)):
            node_at = returned  # to be called later
        else:
            continue
        assert node_at.end_lineno
        begin = starts[node_at.lineno - 1] + node_at.col_offset
        end = starts[node_at.end_lineno - 1] + (node_at.end_col_offset or 0)
        comment = text.splitlines()[node_at.lineno - 1].decode().partition("  # ")[2]
        yield Wait(path, function_at(tree, node_at.lineno), begin, end, text[begin:end].decode(), comment)


def function_at(tree: ast.AST, line: int) -> str:
    """Return the name of the innermost function that a line belongs to."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno).name if around else ""


def is_method(node: ast.AST | None) -> bool:
    """Whether this is a method that waits for the device."""
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr in METHODS or (node.attr == "wait" and ast.unparse(node.value) not in OTHERS)


def first_value(node: ast.AST | None) -> ast.AST | None:
    """What a conditional expression gives if its condition holds."""
    return node.body if isinstance(node, ast.IfExp) else node


def names_of_arrived(tree: ast.AST) -> set[str]:
    """Return the names of variables, fields and arguments that wait for copies, as they are annotated."""
    return {
        name_of(node.target if isinstance(node, ast.AnnAssign) else node)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation and ARRIVED in ast.unparse(node.annotation)
    }


def is_arrived(callee: ast.AST, arrived: set[str]) -> bool:
    """Whether this waits for copies: by its name, or as the variable ``wait`` of a loop over such."""
    return name_of(callee) in arrived or bool(arrived and isinstance(callee, ast.Name) and callee.id == "wait")


def name_of(node: ast.AST) -> str:
    """Return the last name of an expression: ``b`` of ``a.b[0]``."""
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) else ""


def tests_of(wait: Wait) -> tuple[str, ...]:
    """Return what can see a wait: all, in a file that is not named."""
    return TESTS.get(wait.path.stem, ("tests/standin",))


def tried(wait: Wait, copy: Path) -> tuple[str, float]:
    """What became of the tests without a wait, and the seconds that took."""
    began = time.monotonic()
    path = copy / wait.path.relative_to(ROOT)
    text = path.read_bytes()
    path.write_bytes(text[: wait.begin] + NOTHING.encode() + text[wait.end :])
    try:
        code, output = run_tests(tests_of(wait), copy)
    finally:
        path.write_bytes(text)
    if code == 0:
        return f"not found: {wait.comment}" if wait.comment else MISSED, time.monotonic() - began
    if code != 1:
        return f"NOT RUN ({code})", time.monotonic() - began
    return "found: " + how(output), time.monotonic() - began


def how(output: str) -> str:
    """What the first test that failed saw."""
    reported = dict.fromkeys(REPORTED.findall(output))
    raised = [words for words in RAISED.findall(output) if not words.startswith("Assertion")]
    return ", ".join(reported) or (raised[-1][:60] if raised else "values or counts")


def run_tests(tests: tuple[str, ...], copy: Path) -> tuple[int, str]:
    """Pytest's exit code and output."""
    python = copy / ".venv/bin/python"
    command = [
        copy / "tests/standin/device/run.sh",
        python,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-m",
        "standin",
        *tests,
    ]
    environment = {"STANDIN_CHECK": "1", "STANDIN_AGE_MS": "5000", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=os.environ | environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
