"""Measure the size and density of the code: ``bash tests/measure.sh``. Prints figures next to targets."""

import ast
import collections
import statistics
from pathlib import Path

from radon.complexity import cc_visit

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("llama405b", "tools/llama405b_tools")
LONG_FILE, LONG_FUNCTION, COMPLEX = 400, 50, 10  # lines, lines, cyclomatic complexity
ALLOWED_LONG = ("sampler.py", "hostprobe.py")  # one file each, as they travel to hosts


def main():
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    total = sum(lines.values())
    per_room = collections.Counter()
    for path, count in lines.items():
        per_room[str(path.parent.relative_to(ROOT))] += count
    print(f"{total} lines in {len(files)} files, median {statistics.median(lines.values()):.0f}")
    for room, count in sorted(per_room.items()):
        print(f"  {count:6}  {room}")
    scores = [block.complexity for text in texts.values() for block in cc_visit(text)]  # as `radon cc -a` counts
    above = sum(score > COMPLEX for score in scores)
    nodes = [(node, path) for path, tree in trees.items() for node in ast.walk(tree)]
    conditionals = [node for node, _ in nodes if isinstance(node, ast.IfExp)]
    nested = sum(
        any(isinstance(below, ast.IfExp) for below in ast.walk(node) if below is not node) for node in conditionals
    )
    untyped = sum(_is_untyped(node) for node, _ in nodes)
    functions = [(node, path) for node, path in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [node.end_lineno - node.lineno + 1 for node, _ in functions]
    _row("average complexity", statistics.mean(scores), "<= 3.8")
    _row(f"blocks above {COMPLEX}, %", 100 * above / len(scores), "<= 6")
    _row("conditional expressions per 1,000 lines", 1000 * len(conditionals) / total, "<= 15")
    _row("nested conditional expressions", nested, "0")
    _row("Any, object and cast per 1,000 lines", 1000 * untyped / total, "<= 3")
    _row("median function, lines", statistics.median(lengths), "<= 10")
    _row(f"functions over {LONG_FUNCTION} lines", sum(length > LONG_FUNCTION for length in lengths), "0")
    for (node, path), length in zip(functions, lengths, strict=True):
        if length > LONG_FUNCTION:
            print(f"    {path.relative_to(ROOT)}:{node.lineno} {node.name}: {length}")
    long = [path for path in files if lines[path] > LONG_FILE and path.name not in ALLOWED_LONG]
    _row(f"files over {LONG_FILE} lines, beside {' and '.join(ALLOWED_LONG)}", len(long), "0")
    for path in long:
        print(f"    {path.relative_to(ROOT)}: {lines[path]}")
    names = collections.Counter(
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    )
    twice = sorted(name for name, count in names.items() if count > 1)
    _row("public top-level names that exist more than once", len(twice), "")
    print(f"    {', '.join(twice)}")


def _is_untyped(node):
    """``Any``, ``object`` or ``cast`` where a type is meant; the import of them is not counted."""
    return isinstance(node, ast.Name) and node.id in ("Any", "object", "cast")


def _row(what, value, aim):
    shown = f"{value:.1f}" if isinstance(value, float) else str(value)
    print(f"{what:58} {shown:>7}   {f'aim {aim}' if aim else ''}".rstrip())


if __name__ == "__main__":
    main()
