"""What a rank raises goes to the others pickled, by torch and by us: each of our errors arrives as what it was."""

import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import llama405b
import llama405b_tools


def errors():
    """Every class of errors in both packages."""
    found = {}
    for package in (llama405b, llama405b_tools):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith("__main__"):
                continue
            try:
                loaded = vars(importlib.import_module(module.name))
            except ModuleNotFoundError:  # Triton, say
                continue
            classes = [each for each in loaded.values() if inspect.isclass(each) and each.__module__ == module.name]
            found |= dict.fromkeys(each for each in classes if issubclass(each, Exception))
    return list(found)


def check():
    """Send each of them, in a process that may import all modules."""
    known = errors()
    assert len(known) > 20
    for kind in known:
        own = kind.__init__ is not Exception.__init__ and "__init__" in vars(kind)
        hints = list(inspect.signature(kind.__init__).parameters.values())[1:] if own else []
        words = [1 if hint.annotation in (int, "int") else "words" for hint in hints] or ["words"]
        error = kind(*words)
        arrived = pickle.loads(pickle.dumps(error))
        assert (type(arrived), str(arrived), vars(arrived)) == (kind, str(error), vars(error)), kind
    print(len(known), "arrived")


@pytest.mark.slow
def test_an_error_arrives_as_what_it_was():
    # Apart, since other tests take modules away that this one imports.
    line = [sys.executable, "-c", f"import {Path(__file__).stem} as own; own.check()"]
    done = subprocess.run(line, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.endswith(" arrived\n"), done.stderr
