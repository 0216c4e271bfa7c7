"""How Python starts a module of ours, whatever lies in the working directory: a ``random.py`` there shadows no other module.

The working directory, which may hold our packages and the user's own, comes last on ``sys.path``. Our packages are still those of
that directory if it has them, whatever is installed. A program of the user's own is not started so, and inherits nothing of it.
"""

import sys

# One line, so that every login shell passes it on. No ``-P``, so that an older Python can say that it is too old.
# What is imported lives on: collecting garbage among it at every 700 objects takes a fifth of a rank's start.
LOADER = (
    "import gc, sys; gc.set_threshold(10_000); sys.path[:] = [place for place in sys.path if place]; import os, runpy; "
    'here = [os.getcwd(), os.path.abspath("tools")]; sys.path[:0] = here; import llama405b, llama405b_tools; '
    'sys.path[:] = sys.path[2:] + here; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)


def own_argv(module: str, python: str = "") -> list[str]:
    """Return the command that starts a module of ours, with this Python or another.

    ``-P`` is for the processes that it starts in turn, to read data.
    """
    return [python or sys.executable, "-P", "-c", LOADER, module]
