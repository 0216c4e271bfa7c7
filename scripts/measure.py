"""Measure the size and density of the code: ``bash tests/measure.sh``. Prints figures next to targets."""

import ast
import collections
import statistics
from pathlib import Path

from radon.complexity import cc_visit

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("llama405b", "tools/llama405b_tools")
LONG_FILE, SMALL_FILE, LONG_FUNCTION = 400, 40, 50  # lines
COMPLEX, MANY_PARAMETERS, MANY_TARGETS = 10, 8, 3
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ALLOWED_LONG = ("sampler.py", "hostprobe.py")  # one file each, as they travel to hosts


def main():
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    nodes = [(node, path) for path, tree in trees.items() for node in ast.walk(tree)]
    _rooms(files, lines)
    body = sum(_body(tree, texts[path]) for path, tree in trees.items())
    _row("body lines: no docstrings, blanks or imports", body, "<= 21,300")
    _complexity(texts)
    _density(nodes, sum(lines.values()))
    _functions(nodes)
    long = [path for path in files if lines[path] > LONG_FILE and path.name not in ALLOWED_LONG]
    _row(f"files over {LONG_FILE} lines, beside {' and '.join(ALLOWED_LONG)}", len(long), "0")
    _list(f"{path.relative_to(ROOT)}: {lines[path]}" for path in long)
    _small(files, lines)
    _names(files, trees)
    _readme()


def _rooms(files, lines):
    per_room = collections.Counter()
    for path, count in lines.items():
        per_room[str(path.parent.relative_to(ROOT))] += count
    print(f"{sum(lines.values())} lines in {len(files)} files, median {statistics.median(lines.values()):.0f}")
    for room, count in sorted(per_room.items()):
        print(f"  {count:6}  {room}")
    loose = [path.name for path in files if path.parent == ROOT / PACKAGES[0] and path.name != "__init__.py"]
    _row(f"modules loose in {PACKAGES[0]}", len(loose), "1")


def _complexity(texts):
    scores = [block.complexity for text in texts.values() for block in cc_visit(text)]  # as `radon cc -a` counts
    _row("average complexity", statistics.mean(scores), "<= 3.4")
    _row(f"blocks above {COMPLEX}, %", 100 * sum(score > COMPLEX for score in scores) / len(scores), "<= 3.5")


def _density(nodes, total):
    conditionals = [node for node, _ in nodes if isinstance(node, ast.IfExp)]
    nested = sum(
        any(isinstance(below, ast.IfExp) for below in ast.walk(node) if below is not node) for node in conditionals
    )
    untyped = sum(_is_untyped(node) for node, _ in nodes)
    tuples = sum(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Tuple) and len(target.elts) >= MANY_TARGETS for target in node.targets)
        and isinstance(node.value, ast.Tuple)
        for node, _ in nodes
    )
    _row("conditional expressions per 1,000 lines", 1000 * len(conditionals) / total, "<= 15")
    _row("nested conditional expressions", nested, "0")
    _row("Any, object and cast per 1,000 lines", 1000 * untyped / total, "<= 3")
    _row(f"assignments of {MANY_TARGETS} or more values at once", tuples, "few")


def _functions(nodes):
    functions = [(node, path) for node, path in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [node.end_lineno - node.lineno + 1 for node, _ in functions]
    _row("median function, lines", statistics.median(lengths), "<= 10")
    _row(f"functions over {LONG_FUNCTION} lines", sum(length > LONG_FUNCTION for length in lengths), "0")
    _list(
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length}"
        for (node, path), length in zip(functions, lengths, strict=True)
        if length > LONG_FUNCTION
    )
    many = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {count}"
        for node, path in functions
        if (count := _n_parameters(node)) >= MANY_PARAMETERS
    ]
    _row(f"functions of {MANY_PARAMETERS} or more parameters", len(many), "few")
    _list(many)


def _small(files, lines):
    small = [path for path in files if lines[path] < SMALL_FILE and path.name != "__init__.py"]
    _row(f"modules under {SMALL_FILE} lines", len(small), "few")
    _list(f"{path.relative_to(ROOT)}: {lines[path]}" for path in small)


def _names(files, trees):
    names = collections.Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    )
    twice = sorted(name for name, count in names.items() if count > 1)
    _row("public functions and classes in two modules or more", len(twice), "<= 15")
    _list([", ".join(twice)])
    file_names = collections.Counter(path.name for path in files if path.name != "__init__.py")
    twice = sorted(name for name, count in file_names.items() if count > 1)
    _row("file names that occur twice or more", len(twice), "<= 8")
    _list([", ".join(twice)])


def _readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _row("README, lines", len(text.splitlines()), "<= 130")
    _row("README, words", len(text.split()), "<= 1,200")


def _body(tree, text):
    """Count the lines that are no docstring, import or blank."""
    held = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            held.difference_update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            held.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(held)


def _n_parameters(node):
    arguments = node.args
    return sum(
        argument.arg not in ("self", "cls")
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    )


def _list(rows):
    for row in rows:
        print(f"    {row}")


def _is_untyped(node):
    """``Any``, ``object`` or ``cast`` where a type is meant; the import of them is not counted."""
    return isinstance(node, ast.Name) and node.id in ("Any", "object", "cast")


def _row(what, value, aim):
    shown = f"{value:.1f}" if isinstance(value, float) else str(value)
    print(f"{what:58} {shown:>7}   {f'aim {aim}' if aim else ''}".rstrip())


if __name__ == "__main__":
    main()
