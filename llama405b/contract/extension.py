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
from llama405b.contract.software import DOCS

LOSS_CLASS = "Loss"
FUNCTIONS = ("metrics", "loss", "documents", "every", "saved", "evaluated")
IDENTITY_FUNCTIONS = (
    "loss",
    LOSS_CLASS,
    "documents",
)  # these change what a run trains on, so its identity has the module's hash
READS, EVERY = "READS", "EVERY"


@dataclasses.dataclass(frozen=True, slots=True)
class ExtensionModule:
    """The functions, the class and the constants that the user's module defines."""

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
    def identity_label(self) -> str:
        """The module's part of a run's identity; ``none`` if it changes neither loss nor data."""
        return f"{self.name} {self.sha256[:12]}" if {*IDENTITY_FUNCTIONS} & {*self.functions} else "none"

    def reads_file(self, file: object) -> bool:
        """Whether the module reads the documents of this file."""
        name = str(file).rpartition("/")[2]
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.reads)


def read_extension(module: str) -> ExtensionModule:
    """Return what a ``.py`` file or an importable module defines; nothing for ``""``.

    Raises:
        UserError: The module is missing, is not valid Python, or defines none of the functions.
    """
    if not module:
        return ExtensionModule()
    path = _find_module_file(module)
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
    functions = tuple(
        node.name
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS)
        or (isinstance(node, ast.ClassDef) and node.name == LOSS_CLASS)
    )
    values = dict(_read_values(tree, path))
    imported = [
        name.asname or name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names
    ]
    if LOSS_CLASS in imported:
        raise UserError(
            f"--extend: {path}: {LOSS_CLASS} is imported; define the class in this file, also as a subclass of that one"
        )
    if not functions:
        raise UserError(
            f"--extend: {path} defines none of {', '.join((*FUNCTIONS, LOSS_CLASS))}; see {DOCS}/extending.md"
        )
    if {"loss", LOSS_CLASS} <= {*functions}:
        raise UserError(f"--extend: {path}: defines loss() and {LOSS_CLASS}; keep one of them")
    extension = ExtensionModule(
        str(path), hashlib.sha256(text).hexdigest(), functions, values.get(READS, ()), values.get(EVERY, 0), module
    )
    for function, value, example in (("documents", READS, '("*.pgn",)'), ("every", EVERY, "100")):
        if (function in functions) != (value in values):
            raise UserError(
                f"--extend: {path}: {function}() and {value} belong together; write {value} = {example}, or remove the other"
            )
    return extension


def _find_module_file(module: str) -> Path:
    if module.endswith(".py"):
        return Path(module)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise UserError(f"--extend: no module named {module!r}; pass an installed module or a .py file")
    return Path(spec.origin)


def _read_values(tree: ast.Module, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the constants READS and EVERY that the module assigns."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name() as target], value=expression):
                pass
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as expression):
                pass
            case _:
                continue
        if target.id not in (READS, EVERY):
            continue
        try:
            value = ast.literal_eval(expression)
        except ValueError:
            value = None
        if target.id == EVERY and isinstance(value, int) and value > 0:
            yield EVERY, value
        elif (
            target.id == READS
            and isinstance(value, tuple | list)
            and value
            and all(isinstance(pattern, str) for pattern in value)
        ):
            yield READS, tuple(value)
        else:
            expected = (
                "a number of steps, such as 100" if target.id == EVERY else 'a list of patterns, such as ("*.pgn",)'
            )
            raise UserError(f"--extend: {path}:{node.lineno}: {target.id} must be {expected}, written as a literal")
