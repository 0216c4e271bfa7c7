"""Measure what a reader has to carry: ``bash tests/measure.sh [CHECKOUT]``. Prints figures, and aims where there are any.

Statements are those of the syntax tree: comments, docstrings and imports are none. Of each journey, a profiler counts the files of
ours that are opened and the functions that are entered: in the process of the command, or of a rank. It starts runs of the demo's model on
this machine; two minutes.
"""

import ast
import collections
import contextlib
import dataclasses
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from radon.complexity import cc_visit

HERE = Path(__file__).resolve().parent.parent
PACKAGES = ("llama405b", "tools/llama405b_tools")
LONG_MODULE, LONG_FUNCTION, MANY_PARAMETERS = 800, 60, 8
RECORDS = ("dataclass", "NamedTuple", "Struct", "TypedDict")
TRAIN = (
    "--preset demo --model.path models/demo --data.paths corpus.jsonl --data.seq_len 64 --parallel.device cpu "
    "--training.global_batch_size 2 --training.micro_batch_size 1 --checkpoint.every 2"
)
INSIDE = {"a step": "Trainer.run_step", "a save": "Checkpointer.after_step", "a resume": "resume_run"}
KEY = "TopApp.on_key"
PROFILED = """
import collections, json, os, sys, threading
root, out, inside, *argv = sys.argv[1:]
found, depth = collections.defaultdict(set), 0
def look(frame, event, _):
    global depth
    code = frame.f_code
    if code.co_qualname == inside and event in ("call", "return"):
        depth += 1 if event == "call" else -1
    file = code.co_filename
    is_function = code.co_flags & 1 and code.co_name[0] != "<"  # no class body, which is run where its module is imported
    if event == "call" and is_function and (depth or not inside) and file.startswith(root) and "/.venv/" not in file:
        found[file].add(code.co_qualname)
def told():
    sys.setprofile(None)
    open(out, "w").write(json.dumps({file: sorted(names) for file, names in list(found.items())}))
if inside and inside != "TopApp.on_key":
    from llama405b import train
    end, os._exit = os._exit, lambda code: (told(), end(code))
    run = lambda: train.main(argv)
else:
    from llama405b_tools import cli
    run = lambda: cli.main(argv)
threading.setprofile(look)
sys.setprofile(look)
try:
    run()
finally:
    told()
"""
KEYS = """
import asyncio, sys
from llama405b_tools.verbs import top
"""


@dataclasses.dataclass(eq=False)
class Module:
    """A file of the product."""

    path: Path
    room: str
    text: str

    def __post_init__(self):
        self.tree = ast.parse(self.text)
        self.lines = self.text.count("\n")
        self.nodes = list(ast.walk(self.tree))
        self.classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        self.functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.imports = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        self.records = [node for node in self.classes if _is_record(node)]
        texts = {
            id(node.body[0])
            for node in (self.tree, *self.classes, *self.functions)
            if ast.get_docstring(node) is not None
        }
        self.statements = sum(
            isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in texts
            for node in self.nodes
        )
        top = [node for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        self.public = [node.name for node in top if not node.name.startswith("_")]


def _is_record(node):
    named = [*node.bases, *(each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)]
    return any(ast.unparse(each).rpartition(".")[2] in RECORDS for each in named)


def main(root):
    modules = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            inside = path.relative_to(root / package).parts
            room = f"{package.rpartition('/')[2]}/{inside[0] if len(inside) > 1 else ''}"
            modules.append(Module(path, room, path.read_text(encoding="utf-8")))
    _rooms(modules)
    _shape(root, modules)
    _journeys(root)


def _rooms(modules):
    print(
        f"{'':28} {'modules':>7} {'lines':>7} {'statements':>10} {'functions':>9} {'public':>7} {'records':>7} {'fields':>7} {'imports':>7}"
    )
    rooms = collections.defaultdict(list)
    for module in modules:
        rooms[module.room].append(module)
    packages = {package.rpartition("/")[2]: package for package in PACKAGES}
    totals = {name: [module for module in modules if module.room.startswith(f"{name}/")] for name in packages}
    for name, held in [*sorted(rooms.items()), *totals.items(), ("all", modules)]:
        figures = (
            len(held),
            sum(module.lines for module in held),
            sum(module.statements for module in held),
            sum(len(module.functions) for module in held),
            sum(len(module.public) for module in held),
            sum(len(module.records) for module in held),
            sum(
                isinstance(node, ast.AnnAssign) for module in held for record in module.records for node in record.body
            ),
            sum(node.end_lineno - node.lineno + 1 for module in held for node in module.imports),
        )
        print(
            f"{name:28} {figures[0]:7} {figures[1]:7} {figures[2]:10} {figures[3]:9} "
            + " ".join(f"{each:7}" for each in figures[4:])
        )


def _shape(root, modules):
    scores = [block.complexity for module in modules for block in cc_visit(module.text)]  # as `radon cc -a` counts
    _row("average complexity", statistics.mean(scores), "<= 4")
    conditionals = [node for module in modules for node in module.nodes if isinstance(node, ast.IfExp)]
    nested = sum(
        any(isinstance(below, ast.IfExp) for below in ast.walk(node) if below is not node) for node in conditionals
    )
    _row("conditional expressions within one another", nested, "0")
    lengths = {(module, node): node.end_lineno - node.lineno + 1 for module in modules for node in module.functions}
    _row("median function, lines", statistics.median(lengths.values()), "")
    _listed(
        f"functions over {LONG_FUNCTION} lines",
        [
            f"{module.path.relative_to(root)}:{node.lineno} {node.name}: {n}"
            for (module, node), n in lengths.items()
            if n > LONG_FUNCTION
        ],
    )
    _listed(
        f"modules over {LONG_MODULE} lines",
        [f"{module.path.relative_to(root)}: {module.lines}" for module in modules if module.lines > LONG_MODULE],
    )
    _row("functions of one or two statements", sum(_statements(node) <= 2 for _, node in lengths), "")
    _row(
        f"functions of {MANY_PARAMETERS} or more parameters",
        sum(_n_parameters(node) >= MANY_PARAMETERS for _, node in lengths),
        "few",
    )
    _row("private functions of up to three statements, used once", _used_once(modules), "few")
    _row("blocks of Raises:", sum(module.text.count("Raises:\n") for module in modules), "")
    counts = collections.Counter(name for module in modules for name in module.public)
    _row("public names in two modules or more", sum(count > 1 for count in counts.values()), "")
    readme = (root / "README.md").read_text(encoding="utf-8")
    _row("README, lines", len(readme.splitlines()), "<= 90")


def _used_once(modules):
    uses = collections.Counter()
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.Name):
                uses[module.path, node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[module.path, node.attr] += 1
    return sum(
        node.name.startswith("_")
        and not node.name.startswith("__")
        and _statements(node) <= 3
        and uses[module.path, node.name] == 1
        for module in modules
        for node in module.functions
    )


def _statements(function):
    documented = ast.get_docstring(function) is not None
    return sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1 - documented


def _n_parameters(node):
    arguments = node.args
    return sum(
        argument.arg not in ("self", "cls")
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    )


def _journeys(root):
    print(f"{'journeys':28} {'files':>7} {'functions':>9}")
    with tempfile.TemporaryDirectory(prefix="l4measure-") as scratch:
        work = Path(scratch)
        for name in PACKAGES:  # hosts run what is in the working directory
            (work / Path(name).parts[0]).symlink_to(root / Path(name).parts[0])
        (work / "hosts").write_text("localhost slots=1\n")
        (work / "corpus.jsonl").write_text(
            "".join(json.dumps({"text": f"{n} the cat sat on the mat " * 9}) + "\n" for n in range(99))
        )
        _profiled(root, work, "", "demo models/demo")
        verbs = {
            "plan": "plan --preset llama3.1-405b --gpu h100-80 --nodes 8",
            "launch": f"launch hosts --run r --env OMP_NUM_THREADS=1 --training.max_steps 4 {TRAIN} --follow",
            "status": "status hosts --run r",
            "logs": "logs hosts --run r",
            "stop": "stop hosts --run r",
            "top --once": "top --replay demo --once",
        }
        for name, line in verbs.items():
            _count(name, _profiled(root, work, "", line))
        _count("a key in top", _profiled(root, work, KEY, "top --replay demo"))
        alone = f"--run-dir runs/alone --checkpoint.dir checkpoints {TRAIN} --resume auto"
        for steps, (name, inside) in enumerate(INSIDE.items(), 1):
            _count(name, _profiled(root, work, inside, f"{alone} --training.max_steps {2 * steps}"))


def _profiled(root, work, inside, line):
    out = work / "profile.json"
    out.unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": f"{root}:{root}/tools", "OMP_NUM_THREADS": "1",
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533",
    }  # fmt: skip
    command = [sys.executable, "-P", "-c", PROFILED, str(root), str(out), inside, *line.split()]
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        command, cwd=work, env=environment | {"TERM": "xterm"}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    told = b""
    with contextlib.suppress(OSError):  # the child has ended
        while part := os.read(ours, 1 << 16):
            told += part
            if inside == KEY and b"SIMULATED" in told:
                os.write(ours, b"jq")
                told = b""
    child.wait(300)
    os.close(ours)
    if not out.exists():
        raise SystemExit(f"{line}: {told[-2000:].decode()}")
    return json.loads(out.read_text())


def _count(name, found):
    print(f"  {name:26} {len(found):7} {sum(len(names) for names in found.values()):9}", flush=True)


def _listed(what, rows):
    _row(what, len(rows), "0")
    for row in rows:
        print(f"    {row}")


def _row(what, value, aim):
    shown = f"{value:.1f}" if isinstance(value, float) else str(value)
    print(f"{what:58} {shown:>7}   {f'aim {aim}' if aim else ''}".rstrip())


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE)
