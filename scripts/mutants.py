"""Break the product at random places, and record which test sees each: a table to hold shorter tests to.

    .venv/bin/python scripts/mutants.py choose          eight places of each package, into mutants.toml; those there stay
    .venv/bin/python scripts/mutants.py reach [TESTS]   which tests reach them, into the ignored file mutants.reach
    .venv/bin/python scripts/mutants.py try [WORDS]     try what has no outcome yet with the tests that reach it, to the first failure

A mutant changes one expression of a function: a comparison, a constant, a condition, a call left out, or two arguments swapped. ``TESTS``
are folders of tests, by default unit and ranks. ``WORDS``: only the mutants whose package or text has them. ``scripts/mutations.py random``
tries the mutants that a test killed again, each with that test alone. ``survived nearby`` was written by hand: only the tests near the
mutant were tried, not all that reach it.
"""

import ast
import collections
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import mutations
from mutations import PACKAGES, ROOT

TABLE, REACH = ROOT / "scripts/mutants.toml", ROOT / "scripts/mutants.reach"
SEED, PER_PACKAGE = 405, 8
OPPOSITES = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
HEADING = "# Random mutants, what became of each, and the test that saw it first. Written by scripts/mutants.py.\n"
TEST_LIMIT_S = 120  # of one test: a mutant may never end
HIT = '''import os
SEEN = set()

def hit(number):
    """Note that the running test has come to a mutant's place."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (number, test) not in SEEN:
        SEEN.add((number, test))
        file = os.open({path!r}, os.O_APPEND | os.O_WRONLY | os.O_CREAT)
        os.write(file, f"{{number}}\\t{{test}}\\n".encode())
        os.close(file)
'''
IMPORT = "try:\n    from mutants_hit import hit as _hit\nexcept ImportError:\n    def _hit(number): pass\n"
Table = list[dict[str, str | list[str]]]


def read_table() -> Table:
    """The mutants so far."""
    return tomllib.loads(TABLE.read_text())["mutant"] if TABLE.exists() else []


def write_table(table: Table) -> None:
    """Write the mutants, with the outcomes so far."""
    lines = [HEADING]
    for mutant in table:
        lines += [
            "[[mutant]]",
            *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in mutant.items()),
            "",
        ]
    TABLE.write_text("\n".join(lines))


def package_of(path: Path) -> str:
    """The package of a module, as ``llama405b.data``; that of a module without one is its parent."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "tools" else parts
    return ".".join(parts[: min(2, len(parts) - 1)])


class ModuleText:
    """A module's text, by the places of its expressions."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.tree = ast.parse(self.data)
        self.line_starts = [0, *(match.end() for match in re.finditer(rb"\n", self.data))]

    def place(self, node: ast.expr) -> tuple[int, int]:
        """The bytes of an expression."""
        assert node.end_lineno
        assert node.end_col_offset is not None
        begin, end = self.line_starts[node.lineno - 1], self.line_starts[node.end_lineno - 1]
        return begin + node.col_offset, end + node.end_col_offset

    def __getitem__(self, node: ast.expr) -> str:
        """The text of an expression."""
        begin, end = self.place(node)
        return self.data[begin:end].decode()


Change = tuple[str, int, int, str]  # kind, begin, end, new text


def candidates(path: Path) -> list[Change]:
    """Return each change that the functions of a module allow."""
    text, changes = ModuleText(path), list[Change]()
    for function in ast.walk(text.tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body[bool(ast.get_docstring(function)) :]:
                changes += _changes_below(statement, text)
    return list(dict.fromkeys(changes))  # those of a function inside another were met twice


def _changes_below(node: ast.AST, text: ModuleText) -> Iterator[Change]:
    """Yield the changes of a statement or expression, and of all in it."""
    if isinstance(
        node, ast.JoinedStr | ast.pattern | ast.Raise | ast.Assert
    ):  # in an f-string Python 3.11 tells wrong places
        return
    yield from _conditions(node, text)
    yield from _values(node, text)
    for name, child in ast.iter_fields(node):
        for inner in child if isinstance(child, list) else [child]:
            if isinstance(inner, ast.AST) and name != "annotation":
                yield from _changes_below(inner, text)


def _conditions(node: ast.AST, text: ModuleText) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=[op], left=left, comparators=[right]):
            yield "comparison", *text.place(node), f"({text[left]}) {OPPOSITES[type(op)]} ({text[right]})"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", *text.place(test), f"(not ({text[test]}))"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield "condition", *text.place(node), f"({word.join(f'({text[value]})' for value in values)})"


def _values(node: ast.AST, text: ModuleText) -> Iterator[Change]:
    match node:
        case ast.Constant(value=bool(value)):
            yield "constant", *text.place(node), str(not value)
        case ast.Constant(value=int() | float() as number):
            yield "constant", *text.place(node), repr(number + 1)
        case ast.Expr(value=ast.Call() as call):
            yield "call left out", *text.place(call), "None"
        case ast.Call(args=[ast.Name() | ast.Attribute() as first, ast.Name() | ast.Attribute() as second, *_]):
            (begin, comma), (after, end) = text.place(first), text.place(second)
            between = text.data[comma:after].decode()
            if text[first] != text[second]:
                yield "arguments swapped", begin, end, f"{text[second]}{between}{text[first]}"


def choose() -> None:
    """Choose mutants until each package has ``PER_PACKAGE``, of all kinds in turn."""
    table, by_package = read_table(), collections.defaultdict[str, list[Path]](list)
    sources = {path: path.read_text() for part in PACKAGES for path in sorted((ROOT / part).rglob("*.py"))}
    for path in sources:
        by_package[package_of(path)].append(path)
    for package, paths in sorted(by_package.items()):
        rng, n_chosen = random.Random(f"{SEED} {package}"), sum(mutant["package"] == package for mutant in table)
        found = [(path, *change) for path in paths for change in candidates(path)]
        rng.shuffle(found)
        turns, order = collections.Counter[str](), []
        for change in found:
            order.append((turns[change[1]], change))
            turns[change[1]] += 1
        for _, (path, kind, begin, end, text) in sorted(order, key=lambda entry: entry[0]):
            if n_chosen >= PER_PACKAGE:
                break
            old, new = in_lines(sources[path], begin, end, text)
            is_unique = sum(source.count(old) for source in sources.values()) == 1
            if is_unique and all(old != mutant["old"] for mutant in table):
                table.append({"package": package, "kind": kind, "old": old, "new": new, "tests": [], "outcome": ""})
                n_chosen += 1
    write_table(table)
    print(f"{len(table)} mutants of {len(by_package)} packages")


def in_lines(source: str, begin: int, end: int, new: str) -> tuple[str, str]:
    """Return the lines around a change, before and after it: as many as are unique in their module."""
    data = source.encode()
    first, last = data.rfind(b"\n", 0, begin) + 1, data.find(b"\n", end)
    while data.count(data[first:last]) > 1 and first:
        first = data.rfind(b"\n", 0, first - 1) + 1
    return data[first:last].decode(), (data[first:begin] + new.encode() + data[end:last]).decode()


def reach(folders: list[str]) -> None:
    """Run the tests with a probe at each mutant's place, and write which tests come to it."""
    table = read_table()
    with tempfile.TemporaryDirectory(prefix="l4mutants-") as scratch:
        copy, hits = mutations.make_copy(scratch), Path(scratch) / "hits"
        [packages] = (copy / ".venv/lib").glob("python*/site-packages")
        (packages / "mutants_hit.py").write_text(HIT.format(path=str(hits)))
        for path in (path for part in PACKAGES for path in (copy / part).rglob("*.py")):
            probe(path, table)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        options = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
        command = [copy / ".venv/bin/python", *options, "-m", "not gpu and not soak"]
        subprocess.run([*command, *(f"tests/{folder}" for folder in folders)], cwd=copy, env=environment, check=False)
        lines = sorted({*hits.read_text().splitlines()})
    known = {*REACH.read_text().splitlines()} if REACH.exists() else set()
    keyed = [f"{table[int(number)]['old']!r}\t{test}" for number, test in (line.split("\t", 1) for line in lines)]
    REACH.write_text("\n".join(sorted({*known, *keyed})))


def probe(path: Path, table: Table) -> None:
    """Put a probe at each place of a module that a mutant changes."""
    source, places = path.read_text(), []
    for number, mutant in enumerate(table):
        if str(mutant["old"]) in source:
            changes = [change[1:] for change in candidates(path)]
            wanted = mutant["old"], mutant["new"]
            places += [
                (begin, end, number) for begin, end, new in changes if in_lines(source, begin, end, new) == wanted
            ]
    data, inserted = source.encode(), list[tuple[int, int, int, bytes]]()
    for begin, end, number in set(places):
        if table[number]["kind"] == "arguments swapped":
            end = begin + data[begin:end].index(b",")
        inserted += [
            (end, 0, 0, b"))"),
            (begin, 1, -end, f"(_hit({number}) or (".encode()),
        ]  # the outer of two begins first
    parts, at = list[bytes](), 0
    for position, _, _, text in sorted(inserted):
        parts += [data[at:position], text]
        at = position
    data = b"".join([*parts, data[at:]])
    if places:
        tree = ast.parse(source)
        first = next(
            node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        )
        lines = data.decode().splitlines(keepends=True)
        path.write_text("".join([*lines[: first.lineno - 1], IMPORT, *lines[first.lineno - 1 :]]))


def try_all(words: str) -> int:
    """Try the mutants that have no outcome yet; write the table after each."""
    table, tests = read_table(), collections.defaultdict[str, list[str]](list)
    for line in REACH.read_text().splitlines():
        old, _, test = line.partition("\t")
        tests[old].append(test)
    sound: dict[str, bool] = {}  # tests that fail without a mutant, too
    with tempfile.TemporaryDirectory(prefix="l4mutants-") as scratch:
        copy = mutations.make_copy(scratch)
        for mutant in table:
            if mutant["outcome"] or words not in f"{mutant['package']} {mutant['old']}":
                continue
            reaching = tests[repr(mutant["old"])]
            killer = first_failure(mutant, copy, reaching, sound)
            mutant["tests"] = [killer.removeprefix("tests/")] if "::" in killer else []
            if killer:  # a file alone: it could not be collected
                mutant["outcome"] = "killed" if mutant["tests"] else "killed at import"
            else:
                mutant["outcome"] = "survived" if reaching else "not reached"
            write_table(table)
            print(
                f"{mutant['outcome']:12} {mutant['package']:24} {mutant['kind']:18} {len(reaching):5} {killer}",
                flush=True,
            )
    print(dict(collections.Counter(mutant["outcome"] for mutant in table)))
    return 0


def first_failure(mutant: dict[str, str | list[str]], copy: Path, reaching: list[str], sound: dict[str, bool]) -> str:
    """Return the first test that fails with a mutant, and passes without it; '' if none does."""
    for kind in ("tests/unit/", "tests/ranks/", "tests/hosts/"):
        pending = [test for test in reaching if test.startswith(kind) and sound.get(test, True)]
        while pending:
            with mutations.mutated(copy, str(mutant["old"]), str(mutant["new"])) as applies:
                assert applies, mutant["old"]
                failed = run_to_failure(copy, pending)
            if not failed:
                break
            if failed not in sound:
                sound[failed] = mutations.run_tests((failed,), copy) == 0
            if sound[failed]:
                return failed
            pending = [test for test in pending if test != failed]
    return ""


def run_to_failure(copy: Path, tests: list[str]) -> str:
    """Run tests until one fails; return that one, or ''. A test that takes ``TEST_LIMIT_S`` fails.

    Raises:
        RuntimeError: Which one failed cannot be told.
    """
    (copy / "chosen").write_text("\n".join(tests))
    workers = "2" if len(tests) > 20 or sum("::" not in test for test in tests) > 2 else "0"  # files are many tests
    options = f"-m pytest -x -q -p no:cacheprovider --timeout {TEST_LIMIT_S} -n {workers} @chosen".split()
    command, environment = [copy / ".venv/bin/python", *options], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    if failed := re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE):
        return failed[1]
    raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def main(argv: list[str]) -> int:
    """Run one of the three steps."""
    match argv:
        case ["choose"]:
            choose()
        case ["reach", *folders]:
            reach(folders or ["unit", "ranks"])
        case ["try", *words]:
            return try_all(" ".join(words))
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
