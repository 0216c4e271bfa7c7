"""Have a host run a verb: write a model from a checkpoint that it has, or send that."""

import shlex
from collections.abc import Callable, Sequence

from llama405b.contract.errors import RunError, UserError
from llama405b.contract.phrases import given
from llama405b_tools.hosts.dialogue import run_streaming
from llama405b_tools.hosts.fleet import Fleet
from llama405b_tools.hosts.login_shell import own_line, shell_path


def call_on(fleet: Fleet, host: str, words: Sequence[str], say: Callable[[str], object], setup: str = "") -> None:
    """Run a verb there, in its working directory; ``say`` takes what it prints. ``setup``: a shell line to run before.

    Raises:
        UserError: It was refused there, which its last lines explain.
        RunError: It failed, or the connection was lost; the same command resumes.
    """
    python, workdir = shell_path(fleet.python(host)), shell_path(fleet.workdir(host))
    before = f"{fleet.hosts[host].prefix or 'true'} && cd {workdir} && {given('{} && ', setup)}"
    line = f"{before}{own_line(python, 'llama405b_tools.cli')} {shlex.join(words)}"
    code = run_streaming(fleet.connection(host), line, lambda said: say(f"{host}: {said}"))
    if code == "2":
        raise UserError(f"{host}: {words[0]} was refused; see above")
    if code != "0":
        why = f"{words[0]} ended with exit code {code}; see above" if code else "the connection was lost"
        raise RunError(f"{host}: {why}; run the same command to resume")
