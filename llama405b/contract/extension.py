"""Read what the user's ``--extend`` module defines, without running it. ``llama405b.extend`` runs it."""

import ast
import dataclasses
import fnmatch
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama405b.contract.errors import UserError, reason_of

FUNCTIONS = ("metrics", "loss", "documents", "every", "saved", "evaluated")
LEARNS_BY = ("loss", "documents")  # these change what a run trains on, so its identity has the module's hash
READS, EVERY = "READS", "EVERY"


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """The functions and constants that the user's module defines."""

    path: str = ""  # "": there is none
    sha256: str = ""  # of its text
    functions: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()  # patterns of the names of files whose documents it yields
    every: int = 0  # steps
    module: str = ""  # as given: a file, or an importable name

    @property
    def name(self) -> str:
        """The file's name."""
        return Path(self.path).name

    @property
    def described(self) -> str:
        """The module's part of a run's identity; ``none`` if it changes neither loss nor data."""
        return f"{self.name} {self.sha256[:12]}" if {*LEARNS_BY} & {*self.functions} else "none"

    def reads_file(self, file: object) -> bool:
        """Whether the module reads the documents of this file."""
        name = str(file).rpartition("/")[2]
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.reads)


def declared(module: str) -> Declared:
    """Return what a ``.py`` file or an importable module defines; nothing for ``""``.

    Raises:
        UserError: The module is missing, is not valid Python, or defines none of the functions.
    """
    if not module:
        return Declared()
    path = _place_of(module)
    try:
        text = path.read_bytes()
        tree = ast.parse(text, str(path))
    except OSError as error:
        raise UserError(
            f"--extend: {path}: cannot be read ({reason_of(error)}); pass a Python file that exists on every host"
        ) from None
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(
            f"--extend: {path}{line}: is not valid Python ({getattr(error, 'msg', error)}); correct it"
        ) from None
    functions = tuple(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS)
    values = dict(_values(tree, path))
    if not functions:
        raise UserError(f"--extend: {path} defines none of {', '.join(FUNCTIONS)}; see docs/extending.md")
    found = Declared(
        str(path), hashlib.sha256(text).hexdigest(), functions, values.get(READS, ()), values.get(EVERY, 0), module
    )
    for function, value, example in (("documents", READS, '("*.pgn",)'), ("every", EVERY, "100")):
        if (function in functions) != (value in values):
            raise UserError(
                f"--extend: {path}: {function}() and {value} belong together; write {value} = {example}, or remove the other"
            )
    return found


def _place_of(module: str) -> Path:
    if module.endswith(".py"):
        return Path(module)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise UserError(f"--extend: no module named {module!r}; pass an installed module or a .py file")
    return Path(spec.origin)


def _values(tree: ast.Module, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the constants READS and EVERY that the module assigns."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name() as target], value=written):
                pass
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as written):
                pass
            case _:
                continue
        if target.id not in (READS, EVERY):
            continue
        try:
            value = ast.literal_eval(written)
        except ValueError:
            value = None
        if target.id == EVERY and isinstance(value, int) and value > 0:
            yield EVERY, value
        elif (
            target.id == READS
            and isinstance(value, tuple | list)
            and value
            and all(isinstance(each, str) for each in value)
        ):
            yield READS, tuple(value)
        else:
            what = "a number of steps, such as 100" if target.id == EVERY else 'a list of patterns, such as ("*.pgn",)'
            raise UserError(f"--extend: {path}:{node.lineno}: {target.id} must be {what}, written as a literal")
