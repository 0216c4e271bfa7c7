"""Call functions of the user's own module during a run, without a fork (``--extend my_module.py``).

::

    def metrics(context) -> Mapping[str, float]       # after each step: added to metrics.jsonl and to trackers
    def loss(logits_TV, targets_T) -> Tensor         # replaces cross-entropy: the sum over the tokens
    class Loss:                                       # or, of whole documents, see ``model.head.Loss``:
        def count(self, batch) -> Tensor              #   how many terms a batch has
        def loss(self, output, batch) -> Tensor       #   their sum
    READS = ("*.pgn",)
    def documents(path) -> Iterator[str | dict]      # of files that READS matches: texts, or records as in JSON Lines
    EVERY = 100
    def every(context) -> None                        # after each step that is a multiple of EVERY
    def saved(context, path) -> None                  # a checkpoint is complete
    def evaluated(context, loss) -> None

Each function is called on every rank, so it may use collectives. An exception ends the run with a message that names the function. A
process has one module: load it with ``use``, get it with ``current``.

Shape suffixes: T tokens, V vocabulary.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.extension import LOSS_CLASS, ExtensionModule, read_extension
from llama405b.contract.records import Metrics

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, slots=True)
class HookContext:
    """State of a run when it calls a function of the module."""

    step: int  # the last finished step; 0: none
    steps: int  # total steps of the run
    metrics: Metrics | None  # of that step; None: the step was skipped, or there is none
    model: "nn.Module"  # sharded: its parameters are DTensors, unless one rank has all of them
    rank: int
    world: int
    run: Path  # its directory


Moment = HookContext  # its name until 0.2.0, which modules of users import


@dataclasses.dataclass(frozen=True, slots=True)
class Extension:
    """The user's module; without one, nothing is called."""

    declared: ExtensionModule = ExtensionModule()
    module: ModuleType | None = None

    @property
    def has_loss(self) -> bool:
        """Whether the module defines a loss; see ``model.head.UserLoss``."""
        return not {"loss", LOSS_CLASS}.isdisjoint(self.declared.functions)

    @property
    def has_document_loss(self) -> bool:
        """Whether that loss sees the documents of a batch."""
        return LOSS_CLASS in self.declared.functions

    def metrics(self, context: HookContext) -> dict[str, float]:
        """Return the user's metrics of a step; omit numbers that are not finite."""
        result = self.call("metrics", context)
        if result is None:
            return {}
        if not isinstance(result, Mapping) or not all(
            isinstance(name, str) and _is_number(value) for name, value in result.items()
        ):
            raise RunError(
                f"{self.declared.path}: metrics() returned {str(result)[:80]}; return numbers by name, such as {{'lag': 1.5}}"
            )
        return {name: float(value) for name, value in result.items() if math.isfinite(value)}

    def after_step(self, context: HookContext) -> None:
        """Call ``every`` if the step is a multiple of EVERY."""
        if self.declared.every and context.step % self.declared.every == 0:
            self.call("every", context)

    def saved(self, context: HookContext, path: Path) -> None:
        """Call ``saved`` for a complete checkpoint."""
        self.call("saved", context, path)

    def evaluated(self, context: HookContext, loss: float | None) -> None:
        """Call ``evaluated`` after an evaluation; ``loss`` None: it is not finite."""
        self.call("evaluated", context, loss)

    def documents(self, path: Path) -> Iterator[Any]:
        """Yield the documents that the module reads from a file."""
        with self._blame_module("documents"):
            yield from self.module.documents(path)  # type: ignore[union-attr]

    def call_scalar(self, name: str, function: Callable[..., "Tensor"], *args: Any) -> "Tensor":
        """Call a function of the module that returns one number as a tensor."""
        with self._blame_module(name):
            result = function(*args)
        if getattr(result, "shape", None) != () or not hasattr(result, "backward"):
            shown = " ".join(str(result).split())[:80]
            raise RunError(
                f"{self.declared.path}: {name}() returned {shown}; return a tensor with one number, a sum over the batch"
            )
        return result

    def call(self, function: str, *args: Any) -> Any:
        """Call a function of the module, if it has one of this name."""
        if function not in self.declared.functions:
            return None
        with self._blame_module(function):
            return getattr(self.module, function)(*args)

    @contextlib.contextmanager
    def _blame_module(self, function: str) -> Iterator[None]:
        """Raise exceptions of the module as RunError with file, line and function."""
        try:
            yield
        except (UserError, GeneratorExit):
            raise
        except Exception as error:
            raise RunError(
                f"{_error_location(error, self.declared.path)}: {function}() raised {type(error).__name__}: {error}"
            ) from error


_current = Extension()


def use(module: str) -> Extension:
    """Load the module of this process; ``""``: none.

    Raises:
        UserError: It cannot be loaded.
    """
    global _current
    declaration = read_extension(module)
    _current = Extension(declaration, _import_module(declaration.path, module)) if declaration.path else Extension()
    return _current


def current() -> Extension:
    """Return the module of this process."""
    return _current


def _import_module(path: str, module: str) -> ModuleType:
    try:
        return _load_file(path) if module.endswith(".py") else importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - the module may raise anything
        raise UserError(f"--extend: {_error_location(error, path)}: {type(error).__name__}: {error}") from None


def _load_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama405b_extension", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(
        str(Path(path).absolute().parent)
    )  # for imports from its own directory; last, so that they shadow nothing
    spec.loader.exec_module(module)
    return module


def _error_location(error: Exception, path: str) -> str:
    """Return ``path:line`` of the innermost frame of the module in a traceback; without one, the path."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == Path(path).resolve()
    ]
    return f"{path}:{lines[-1]}" if lines else path


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
