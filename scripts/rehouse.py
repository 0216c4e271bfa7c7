"""Move, merge and split modules of both packages as a table says, and rewrite whatever names them: code, tests, texts.

    .venv/bin/python scripts/rehouse.py TABLE [--force]

TABLE is Python, with any of these:
    MODULES = {"new.module": ["old.module", …]}     merged, what is imported before what imports it
    NAMES = {"old.module.name": "new_name"}
    PLACES = {"old.module.name": "new.module"}      of a name that does not go with its module
    DOCS = {"new.module": "First line of its docstring."}
    DOC_OF = {"new.module": "old.module"}           whose docstring stands there alone: a verb's is its help
    FILES = {"old/path": "new/path"}                data, tests
    BEFORE, TEXT = [(path, old, new), …]            what is changed in a file by hand, before and after
A name that would mean two things is printed, and then nothing is written but BEFORE. Then: ruff check --fix --select F401,I; ruff format;
tests/check.sh. What it does not know: names in another form than ``module.name``, such as imports in code within strings.
"""

import ast
import collections
import dataclasses
import io
import itertools
import re
import runpy
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"llama405b": "", "llama405b_tools": "tools/"}
UNTOUCHED = ("CHANGELOG.md", "docs/measurements", "tests/data")
TEXTS = (".md", ".toml", ".sh", ".yml", ".txt", ".html", ".json")
LITERAL = re.compile(r"""(?<!\w)([rRbBfFuU]{0,2})(\"{3}|'{3}|"|')""")
FORMATTED = re.compile(r"""[rR]?[fF][rR]?['"]""")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SECTIONS = (
    "model",
    "data",
    "parallel",
    "training",
    "checkpoint",
    "tracking",
)  # of settings, whose names look like modules'
Edit = tuple[int, int, str]


class File:
    """A Python file: its text, its tree, where each node stands, and what is to be changed."""

    def __init__(self, path: Path, name: str) -> None:
        """``name``: dotted; '' outside the packages."""
        self.path, self.name, self.text = path, name, path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.lines = self.text.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]
        self.edits: list[Edit] = []
        self.places: dict[int, tuple[int, int]] = {}
        self.parents = {id(child): node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.top = bound(self.tree.body)
        for node in ast.walk(self.tree):  # from the outside in: an inner one's place is known then
            if isinstance(node, ast.JoinedStr) and id(node) not in self.places:
                self._place_fields(node)

    def _place_fields(self, string: ast.JoinedStr) -> None:
        """Find where the expressions of an f-string stand, which Python's parser says only from 3.12 on."""
        start, end = self.places[id(string)] = self.span(string)
        for field, (at, expression) in zip(fields_in(string), fields_of(self.text[start:end]), strict=True):
            if field.format_spec:
                self.places[id(field.format_spec)] = start, end  # its fields are among these
            again = ast.parse(f"({expression})", mode="eval").body
            lines = f"({expression})".splitlines(keepends=True)
            first = [start + at - 1, *itertools.accumulate(map(len, lines), initial=start + at - 1)][1:]
            inner = []
            for real, copy in zip(ast.walk(field.value), ast.walk(again), strict=True):
                if hasattr(copy, "end_lineno"):
                    begin = first[copy.lineno - 1] + _characters(lines[copy.lineno - 1], copy.col_offset)
                    stop = first[copy.end_lineno - 1] + _characters(lines[copy.end_lineno - 1], copy.end_col_offset)
                    self.places[id(real)] = begin, stop
                if isinstance(real, ast.JoinedStr):
                    inner.append(real)
            for below in inner:
                if not any(below in ast.walk(outer) for outer in inner if outer is not below):  # else with that one
                    self._place_fields(below)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends."""
        if id(node) in self.places:
            return self.places[id(node)]
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        first, last = (
            self.starts[line - 1] + _characters(self.lines[line - 1], column) for line, column in (begin, end)
        )
        return first, last

    def change(self, node: ast.AST, new: str) -> None:
        """Note that a node is to be another text."""
        self.edits.append((*self.span(node), new))

    def edited(self, start: int = 0, end: int | None = None) -> str:
        """The text between two offsets, with the edits that lie there."""
        pieces, at, end = [], start, len(self.text) if end is None else end
        for first, last, new in sorted(set(self.edits)):
            if at <= first and last <= end:
                pieces += [self.text[at:first], new]
                at = last
        return "".join([*pieces, self.text[at:end]])


def _characters(line: str, n_bytes: int) -> int:
    return len(line.encode()[:n_bytes].decode())


def fields_in(string: ast.JoinedStr) -> Iterator[ast.FormattedValue]:
    """The fields of an f-string, each before those of its format."""
    for value in string.values:
        if isinstance(value, ast.FormattedValue):
            yield value
            if value.format_spec:
                yield from fields_in(value.format_spec)


def fields_of(source: str) -> Iterator[tuple[int, str]]:
    """Offset and text of each field's expression in the source of an f-string, which may be several literals in a row."""
    at = 0
    while match := LITERAL.search(source, at):
        prefix, quote, end = match[1].lower(), match[2], match.end()
        while not source.startswith(quote, end):
            end += 2 if source[end] == "\\" and "r" not in prefix else 1
        if "f" in prefix:
            yield from _fields(source, match.end(), end)
        at = end + len(quote)


def _fields(source: str, at: int, end: int) -> Iterator[tuple[int, str]]:
    while at < end:
        if source[at] != "{" or source[at + 1] == "{":
            at += 2 if source[at : at + 2] in ("{{", "}}") else 1
            continue
        first, at = at + 1, _end_of_expression(source, at + 1)
        yield first, re.sub(r"(?<![=!<>])=\s*$", "", source[first:at])
        at += 2 * (source[at] == "!")
        if source[at] == ":":
            begin, depth = at, 0
            while source[at] != "}" or depth > 0:
                depth += {"{": 1, "}": -1}.get(source[at], 0)
                at += 1
            yield from _fields(source, begin + 1, at)
        at += 1


def _end_of_expression(source: str, at: int) -> int:
    depth, inside = 0, ""
    while True:
        letter = source[at]
        if letter == inside:
            inside = ""
        elif not inside and letter in "'\"":
            inside = letter
        elif inside:
            pass
        elif not depth and (letter in ":}" or (letter == "!" and source[at + 1] != "=")):
            return at
        else:
            depth += (letter in "([{") - (letter in ")]}")
        at += 1


def bound(body: Iterable[ast.AST]) -> set[str]:
    """The names that statements bind in their own scope, but for imports."""
    names: set[str] = set()
    elsewhere: set[str] = set()
    todo = [*body]
    while todo:
        match node := todo.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
                continue
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                names |= {below.target.id for below in ast.walk(node) if isinstance(below, ast.NamedExpr)}
                continue
            case ast.Import() | ast.ImportFrom():
                continue
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.add(name)
            case ast.Global() | ast.Nonlocal():
                elsewhere |= {*node.names}
        todo += ast.iter_child_nodes(node)
    return names - elsewhere


class Scopes(ast.NodeVisitor):
    """Finds each use of a name, with the names that are bound around it; and annotations in quotes."""

    def __init__(self, tree: ast.Module) -> None:
        self.stack: list[tuple[bool, set[str]]] = []  # is it a class; names
        self.uses: list[tuple[ast.Name, set[str]]] = []
        self.quoted: list[ast.Constant] = []
        self.visit(tree)

    def _all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node:
                self.visit(node)

    def _within(self, names: set[str], body: Iterable[ast.AST | None], *, is_class: bool = False) -> None:
        self.stack.append((is_class, names))
        self._all(body)
        self.stack.pop()

    def _annotated(self, node: ast.AST | None) -> None:
        below = ast.walk(node) if node else ()
        self.quoted += [each for each in below if isinstance(each, ast.Constant) and isinstance(each.value, str)]

    def visit_Name(self, node: ast.Name) -> None:  # noqa: D102
        inner = self.stack[-1][1] if self.stack and self.stack[-1][0] else set()
        self.uses.append((node, inner.union(*(names for is_class, names in self.stack if not is_class))))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:  # noqa: D102
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        self._all([*given.defaults, *given.kw_defaults])
        body = [node.body]
        if isinstance(node, FUNCTIONS):
            body = node.body
            annotations = [node.returns, *(each.annotation for each in every)]
            self._all([*node.decorator_list, *annotations])
            for annotation in annotations:
                self._annotated(annotation)
        self._within({each.arg for each in every} | bound(body), body)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:  # noqa: D102
        self._annotated(node.annotation)
        is_field = self.stack and self.stack[-1][0]  # which is no use of a name
        self._all([None if is_field else node.target, node.annotation, node.value])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: D102
        self._all([*node.decorator_list, *node.bases, *node.keywords])
        fields = [each for each in node.body if not (isinstance(each, ast.AnnAssign) and each.value is None)]
        self._within(bound(fields), node.body, is_class=True)

    def _comprehension(self, node: ast.AST) -> None:
        first, *others = node.generators
        targets = [below for each in node.generators for below in ast.walk(each.target) if isinstance(below, ast.Name)]
        self.visit(first.iter)
        parts = [getattr(node, field, None) for field in ("key", "value", "elt")]
        inside = [first.target, *first.ifs, *(part for each in others for part in (each.target, each.iter, *each.ifs))]
        self._within({below.id for below in targets}, [*parts, *inside])

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension


@dataclasses.dataclass(frozen=True)
class Table:
    """What goes where."""

    modules: dict[str, list[str]]
    names: dict[str, str]
    places: dict[str, str]
    docs: dict[str, str]
    doc_of: dict[str, str]

    def home(self, module: str) -> str:
        """What a module becomes."""
        return next((new for new, olds in self.modules.items() if module in olds), module)

    def where(self, module: str, name: str) -> tuple[str, str]:
        """The new module and name of what a module has."""
        dotted = f"{module}.{name}"
        return self.places.get(dotted) or self.home(module), self.names.get(dotted, name)

    def is_put_together(self, module: str) -> bool:
        """Whether a module's statements are put together anew, and not its file moved as it is."""
        new = self.home(module)
        is_split = any(dotted.rpartition(".")[0] == module for dotted in self.places)
        return len(self.modules.get(new, [module])) > 1 or is_split or new in self.places.values()


class House:
    """The packages as they are, and what is found wrong with the table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        self.listed = [
            path for path in listed.stdout.splitlines() if (ROOT / path).is_file() and not path.startswith(UNTOUCHED)
        ]
        files = [File(ROOT / path, _dotted(path)) for path in self.listed if path.endswith(".py")]
        self.modules = {file.name: file for file in files if file.name}
        self.others = [file for file in files if not file.name]
        self.faults: list[str] = []
        for old in itertools.chain.from_iterable(table.modules.values()):
            if old not in self.modules:
                raise SystemExit(f"there is no module {old}")
        for dotted in (*table.names, *table.places):
            module, _, name = dotted.rpartition(".")
            if module not in self.modules or name not in self.modules[module].top:
                raise SystemExit(f"there is no {dotted}")

    def homes(self, file: File) -> dict[ast.stmt, str]:
        """Where each statement of a module goes."""
        homes = {}
        for statement in file.tree.body:
            names = bound([statement])
            places = {self.table.where(file.name, name)[0] for name in names} or {self.table.home(file.name)}
            if len(places) > 1:
                self.faults.append(f"{file.path}:{statement.lineno}: {names} go to {places}")
            homes[statement] = min(places)
        return homes

    def in_text(self, text: str, *, code: bool = False) -> list[Edit]:
        """Dotted and slashed names of modules in a text; of ``code``, such as an f-string, only those with their package."""
        edits: dict[int, Edit] = {}
        for match in re.finditer(r"(?<![\w./-])((?:[a-z_0-9]+\.)+\w+)(?![\w/(])", text):
            for package in ("", *(f"{package}." for package in SOURCES)):
                is_unsure = package and (code or match[1].partition(".")[0] in SECTIONS)
                if not is_unsure and (new := self._renamed(package + match[1])):
                    edits[match.start()] = (match.start(), match.end(), new.removeprefix(package))
        for match in re.finditer(r"(?<![\w./-])(tools/)?((?:[a-z_0-9]+/)+[a-z_0-9]+)\.py\b", text):
            for package in ("", *(f"{package}." for package in SOURCES)):
                module = package + match[2].replace("/", ".")
                if module in self.modules and (new := self.table.home(module)) != module:
                    edits[match.start(2)] = (match.start(2), match.end(2), new.removeprefix(package).replace(".", "/"))
        return sorted(edits.values())

    def _renamed(self, dotted: str) -> str:
        parts = dotted.split(".")
        for size in range(len(parts), 1, -1):
            module, rest = ".".join(parts[:size]), parts[size:]
            if module in self.modules:
                new = self.table.home(module)
                if rest and rest[0] in self.modules[module].top:
                    new, rest[0] = self.table.where(module, rest[0])
                found = ".".join([new, *rest])
                return found if found != dotted else ""
        return ""


def _dotted(path: str) -> str:
    for package, before in SOURCES.items():
        if path.startswith(f"{before}{package}/"):
            return path[len(before) : -3].replace("/", ".").removesuffix(".__init__")
    return ""


class Rewriting:
    """One file: its uses of what moves, and its imports."""

    def __init__(self, house: House, file: File, homes: dict[ast.stmt, str]) -> None:
        """``homes``: where its statements go, if they are put together anew."""
        self.house, self.file, self.table, self.homes = house, file, house.table, homes
        self.bindings: dict[str, tuple[str, str]] = {}  # name here: old module, and name there or ''
        self.imports: list[ast.ImportFrom] = []
        self.asnames: set[str] = set()
        self.needed: dict[str, set[str]] = {}  # old module that is bound and used: new modules
        self.lacking: dict[str, set[str]] = collections.defaultdict(set)  # new module: imports of what stood beside it
        self.home_of = {id(below): home for statement, home in homes.items() for below in ast.walk(statement)}
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._bind(node)
        scopes = Scopes(file.tree)
        for use, local in scopes.uses:
            if use.id not in local:
                self._use(use, local)
        for constant in scopes.quoted:
            self._quoted(constant)
        for node in self.imports:
            if not homes or node not in file.tree.body:
                self._import(node)
        self._definitions()
        self._words()

    def _bind(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            here, full = alias.asname or alias.name, f"{node.module}.{alias.name}"
            if full in self.house.modules or node.module in self.house.modules:
                self.bindings[here] = (full, "") if full in self.house.modules else (node.module, alias.name)
                self.asnames |= {alias.asname} - {None}
                if node not in self.imports:
                    self.imports.append(node)

    def _use(self, use: ast.Name, local: set[str]) -> None:
        home = self.home_of.get(id(use), "")
        if use.id in self.bindings:
            module, name = self.bindings[use.id]
            if not name:
                self._of_module(use, module, home, local)
            elif (meant := self.table.where(module, name))[1] != name and use.id == name:
                self._rename(use, meant[1], meant, local)
        elif self.file.name and use.id in self.file.top:
            meant = self.table.where(self.file.name, use.id)
            if meant[1] != use.id:
                self._rename(use, meant[1], meant, local)
            if home and meant[0] != home:
                self.lacking[home].add(f"from {meant[0]} import {meant[1]}")

    def _of_module(self, use: ast.Name, module: str, home: str, local: set[str]) -> None:
        """Rewrite ``module.name``, or a module as it is patched: ``setattr(module, "name", …)``."""
        parent, patched = self.file.parents.get(id(use)), None
        if isinstance(parent, ast.Call) and len(parent.args) > 1 and parent.args[0] is use:
            patched = parent.args[1] if isinstance(parent.args[1], ast.Constant) else None
        name = str(patched.value) if patched else getattr(parent, "attr", "")
        new_module, new_name = self.table.where(module, name)
        self.needed.setdefault(module, set())
        if isinstance(parent, ast.Attribute):
            if new_module == home:
                self._rename(parent, new_name, (new_module, new_name), local)
                return
            end = self.file.span(parent)[1]
            self.file.edits.append((end - len(name), end, new_name))
        elif new_module == home:
            self._fault(use, f"{use.id} is this module itself now")
        if patched and new_name != name:
            self.file.change(patched, f'"{new_name}"')
        self.needed[module].add(new_module)
        if use.id not in self.asnames or new_module != self.table.home(module):
            self._rename(use, new_module.rpartition(".")[2], (new_module, ""), local)

    def _rename(self, node: ast.AST, new: str, meant: tuple[str, str], local: set[str]) -> None:
        self.file.change(node, new)
        would_be = f"and would be {'.'.join(meant)}"
        if new in local:
            self._fault(node, f"{new} is a local name there, {would_be}")
        other = self.bindings.get(new)
        if other and (self.table.where(*other) if other[1] else (self.table.home(other[0]), "")) != meant:
            self._fault(node, f"{new} is {'.'.join(other)} there, {would_be}")
        if not self.homes and new in self.file.top and meant[0] != self.file.name:
            self._fault(node, f"{new} is defined there, {would_be}")

    def _fault(self, node: ast.AST, what: str) -> None:
        self.house.faults.append(f"{self.file.path}:{node.lineno}: {what}")

    def _quoted(self, constant: ast.Constant) -> None:
        new = constant.value
        known = {here: there for here, there in self.bindings.items() if here == there[1]}
        for name, there in (known | {name: (self.file.name, name) for name in self.file.top if self.file.name}).items():
            if (renamed := self.table.where(*there)[1]) != name:
                new = re.sub(rf"(?<![.\w]){name}\b", renamed, new)
        if new != constant.value:
            self.file.change(constant, f'"{new}"')

    def import_lines(self, node: ast.ImportFrom, home: str) -> list[str]:
        """What an import becomes in a new module."""
        lines = []
        for alias in node.names:
            full, tail = f"{node.module}.{alias.name}", f" as {alias.asname}" if alias.asname else ""
            if full in self.house.modules:
                default = self.table.home(full)
                for new in sorted(self.needed.get(full, {default}) - {home}):
                    package, _, base = new.rpartition(".")
                    lines.append(
                        f"from {package} import {base}{tail if new == default and tail != f' as {base}' else ''}"
                    )
            elif node.module in self.house.modules:
                new, name = self.table.where(node.module, alias.name)
                if new != home:
                    lines.append(f"from {new} import {name}{tail}")
                elif tail:
                    self._fault(node, f"{alias.name} is imported{tail} into its own module")
            else:
                lines.append(f"from {node.module} import {alias.name}{tail}")
        return list(dict.fromkeys(lines))

    def _import(self, node: ast.ImportFrom) -> None:
        lines = self.import_lines(node, self.home_of.get(id(node), ""))
        if lines != [ast.unparse(ast.ImportFrom(node.module, [alias], 0)) for alias in node.names]:
            self.file.change(node, ("\n" + " " * node.col_offset).join(lines) or "pass")

    def _definitions(self) -> None:
        for node in self.file.tree.body if self.file.name else ():
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                new = self.table.where(self.file.name, node.name)[1]
                if new != node.name:
                    match = re.compile(rf"\b{node.name}\b").search(self.file.text, self.file.span(node)[0])
                    self.file.edits.append((*match.span(), new))

    def _words(self) -> None:
        """Strings and comments."""
        for token in tokenize.generate_tokens(io.StringIO(self.file.text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                start = self.file.starts[token.start[0] - 1] + token.start[1]
                for first, last, new in self.house.in_text(token.string, code=bool(FORMATTED.match(token.string))):
                    if not any(a < start + last and start + first < b for a, b, _ in self.file.edits):
                        self.file.edits.append((start + first, start + last, new))


class Assembly:
    """A new module, put together from statements of old ones."""

    def __init__(self, house: House, new: str, rewritten: dict[str, Rewriting]) -> None:
        self.house, self.new, self.table = house, new, house.table
        self.asked = self.table.modules.get(new, [new])
        parts = [part for part in rewritten.values() if new in part.homes.values()]
        parts.sort(
            key=lambda part: self.asked.index(part.file.name) if part.file.name in self.asked else len(self.asked)
        )
        self.imports: dict[str, None] = {}
        self.checking: dict[str, None] = {}  # imports under TYPE_CHECKING
        self.docs: list[str] = []
        self.bodies: list[str] = []
        self.programs: list[str] = []  # what a module does that is run
        self.meaning: dict[str, str] = {}
        self.seen: set[str] = set()  # assignments: two modules may have the same TypeVar
        for part in self._importing_last(parts):
            self._take(part)
        if len(self.programs) > 1:
            house.faults.append(f"{new} would be two programs")

    def _importing_last(self, parts: list[Rewriting]) -> list[Rewriting]:
        wants = {
            part.file.name: {module for module, _ in part.bindings.values()} & {each.file.name for each in parts}
            for part in parts
        }
        order: list[Rewriting] = []
        while len(order) < len(parts):
            there = {part.file.name for part in order}
            free = [part for part in parts if part not in order and wants[part.file.name] <= there]
            if not free:
                self.house.faults.append(f"a circle among {sorted({*wants} - there)}")
                return parts
            order.append(free[0])
        return order

    def _take(self, part: Rewriting) -> None:
        file, is_whole = part.file, part.file.name in self.asked
        self.imports |= dict.fromkeys(sorted(part.lacking.get(self.new, ())))
        doc, body, before = ast.get_docstring(file.tree), "", 0
        if doc is not None and is_whole:
            self.docs.append(self._spelled(doc))
        for number, statement in enumerate(file.tree.body):
            start = file.starts[
                min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))]) - 1
            ]
            end = file.starts[min(statement.end_lineno, len(file.starts) - 1)]
            text, before = file.edited(before, start) + file.edited(start, end), end
            if number == 0 and doc is not None:
                continue
            body += self._taken(part, statement, text)
        self.bodies.append((body + (file.edited(before) if is_whole else "")).strip("\n"))

    def _taken(self, part: Rewriting, statement: ast.stmt, text: str) -> str:
        """What of a statement belongs to the body."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._import(part, statement, self.imports)
            return ""
        if isinstance(statement, ast.If) and all(
            isinstance(below, ast.Import | ast.ImportFrom) for below in statement.body
        ):
            for below in statement.body:
                self._import(part, below, self.checking)
            return ""
        if part.homes[statement] != self.new or (
            isinstance(statement, ast.Assign) and ast.dump(statement) in self.seen
        ):
            return ""
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            self.programs.append(text.strip("\n"))
            return ""
        if isinstance(statement, ast.Assign):
            self.seen.add(ast.dump(statement))
        for name in bound([statement]):
            self._means(self.table.where(part.file.name, name)[1], f"{part.file.name}.{name}", part)
        return text

    def _import(self, part: Rewriting, node: ast.Import | ast.ImportFrom, into: dict[str, None]) -> None:
        lines = part.import_lines(node, self.new) if node in part.imports else [ast.unparse(node)]
        remark = re.search(r"  #.*", part.file.lines[node.end_lineno - 1])
        into |= dict.fromkeys(line + (remark[0] if remark else "") for line in lines)
        for line in lines:
            source, _, names = line.partition("import ")
            for name in names.split(", "):
                what = name if source or " as " in name else name.partition(".")[0]
                self._means(what.split(" as ")[-1], source + what.split(" as ")[0], part)

    def _means(self, name: str, what: str, part: Rewriting) -> None:
        if self.meaning.setdefault(name, what) != what:
            self.house.faults.append(f"{self.new}: {name} is {self.meaning[name]!r}, and in {part.file.name} {what!r}")

    def _spelled(self, doc: str) -> str:
        for first, last, new in reversed(self.house.in_text(doc)):
            doc = doc[:first] + new + doc[last:]
        return doc.strip()

    def text(self) -> str:
        """The module."""
        alone = self.table.doc_of.get(self.new)
        docs = [ast.get_docstring(self.house.modules[alone].tree).strip()] if alone else self.docs
        doc = "\n\n".join(filter(None, [self.table.docs.get(self.new), *docs]))
        lines = [
            f'"""{doc}{chr(10) * (chr(10) in doc)}"""',
            "",
            *sorted(self.imports, key=lambda line: line.startswith("from ")),
        ]
        known = {line.partition("  #")[0] for line in self.imports}
        if missing := [line for line in self.checking if line.partition("  #")[0] not in known]:
            lines += ["", "if TYPE_CHECKING:", *(f"    {line}" for line in missing)]
        return "\n".join(lines) + "\n\n" + "\n\n\n".join(filter(None, [*self.bodies, *self.programs])) + "\n"


def path_of(module: str) -> Path:
    """The file of a module."""
    return ROOT / (SOURCES[module.partition(".")[0]] + module.replace(".", "/") + ".py")


def rewritten_house(house: House) -> dict[Path, str | None]:
    """What the files will be; None: gone."""
    put_together = {name: file for name, file in house.modules.items() if house.table.is_put_together(name)}
    parts = {name: Rewriting(house, file, house.homes(file)) for name, file in put_together.items()}
    results: dict[Path, str | None] = {file.path: None for file in put_together.values()}
    for new in dict.fromkeys(home for part in parts.values() for home in part.homes.values()):
        results[path_of(new)] = Assembly(house, new, parts).text()
    for file in [*house.others, *(file for name, file in house.modules.items() if name not in put_together)]:
        Rewriting(house, file, {})
        new = house.table.home(file.name)
        if new != file.name:
            results[file.path] = None
        results[path_of(new) if new != file.name else file.path] = file.edited()
    for path in house.listed:
        if path.endswith(TEXTS) or not Path(path).suffix:
            text = (ROOT / path).read_bytes().decode(errors="replace")
            edits = house.in_text(text)
            for first, last, new in reversed(edits):
                text = text[:first] + new + text[last:]
            if edits:
                results[ROOT / path] = text
    return results


def replace(changes: Iterable[tuple[str, str, str]]) -> None:
    """Replace texts in files by hand."""
    for path, old, new in changes:
        text = (ROOT / path).read_text(encoding="utf-8")
        if old not in text:
            raise SystemExit(f"{path} has no {old!r}")
        (ROOT / path).write_text(text.replace(old, new), encoding="utf-8")


def move(listed: Iterable[str], files: dict[str, str]) -> None:
    """Move files that are not modules, and what names them."""
    for path in (ROOT / path for path in listed):
        if path.is_file() and path.suffix in (*TEXTS, ".py"):
            text = new = path.read_text(encoding="utf-8")
            for old, moved in files.items():
                new = re.sub(rf"(?<![\w/]){re.escape(old)}(?![\w-])", moved, new)
            if new != text:
                path.write_text(new, encoding="utf-8")
    for old, moved in files.items():
        (ROOT / moved).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / old).rename(ROOT / moved)


def main() -> None:
    """Move as the table says."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    said = runpy.run_path(sys.argv[1])
    replace(said.get("BEFORE", []))
    house = House(Table(*(said.get(what, {}) for what in ("MODULES", "NAMES", "PLACES", "DOCS", "DOC_OF"))))
    results = rewritten_house(house)
    if house.faults:
        print(*sorted({*house.faults}), sep="\n")
        if "--force" not in sys.argv:
            sys.exit(f"{len({*house.faults})} to settle")
    for path, text in results.items():
        if text is None:
            path.unlink()
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    move(house.listed, said.get("FILES", {}))
    replace(said.get("TEXT", []))


if __name__ == "__main__":
    main()
