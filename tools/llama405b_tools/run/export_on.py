"""Have a host run a verb: write a model from a checkpoint that it has, or send that."""

import shlex
from collections.abc import Callable, Sequence

from llama405b.contract.errors import RunError, UserError
from llama405b_tools.hosts.dialogue import run_streaming
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.login_shell import shell_path


def export_on(
    fleet: Fleet, host: str, source: str, out: str, options: Sequence[str], say: Callable[[str], object]
) -> None:
    """Run ``export SOURCE OUT`` there; see ``call_on``."""
    call_on(fleet, host, ["export", source, out, *options], say)


def call_on(fleet: Fleet, host: str, words: Sequence[str], say: Callable[[str], object]) -> None:
    """Run a verb there, in its working directory; ``say`` takes what it prints.

    Raises:
        UserError: It was refused there, which its last lines explain.
        RunError: It failed, or the connection was lost; the same command resumes.
    """
    python, workdir = shell_path(fleet.python(host)), shell_path(fleet.workdir(host))
    written, verb = shlex.join(words), words[0]
    line = f"{fleet.hosts[host].prefix or 'true'} && cd {workdir} && PYTHONPATH=tools {python} -m llama405b_tools.cli {written}"
    code = run_streaming(fleet.connection(host), line, lambda said: say(f"{host}: {said}"))
    if code == "2":
        raise UserError(f"{host}: {verb} was refused; see above")
    if code != "0":
        why = f"{verb} ended with exit code {code}; see above" if code else "the connection was lost"
        raise RunError(f"{host}: {why}; run the same command to resume")
