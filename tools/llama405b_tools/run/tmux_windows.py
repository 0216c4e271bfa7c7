"""A tmux session on this machine, with a window for each host of a run. The only module that imports libtmux."""

import os
import shlex
from collections.abc import Mapping

from llama405b.contract.errors import UserError
from llama405b.contract.paths import RunDir
from llama405b.contract.phrases import given
from llama405b_tools.hosts.fleet import is_local
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.login_shell import in_sh
from llama405b_tools.hosts.printed_commands import command_to_type, file_of
from llama405b_tools.remote.tmux import remove_dead_sockets, tmux_session, tmux_socket


def operator_socket(run: str) -> str:
    """Name the operator's own tmux server for a run: never the run's, which may be on this machine too."""
    return f"{tmux_socket(RunDir.here(run))}-attach"


def window_command(host: Host, socket: str, *, writable: bool) -> str:
    """Return the shell line that attaches to a host's session; ``socket``: of the run's tmux server there."""
    inner = ["tmux", "-u", "-L", socket, "attach", "-t", f"={tmux_session(host.name)}"]
    if not writable:
        inner.append("-r")
    return f"unset TMUX; exec {shlex.join(at_terminal(host, shlex.join(inner)))}"


def at_terminal(host: Host, line: str) -> list[str]:
    """Return the command that runs a shell line on a host, with this terminal."""
    if is_local(host):
        return ["sh", "-c", line]
    options = {"-F": os.environ.get("LLAMA405B_SSH_CONFIG", ""), "-p": given("{}", host.port)}
    words = [word for option, value in options.items() if value for word in (option, value)]
    target = given("{}@", host.user) + host.name
    return ["ssh", "-t", "-o", "BatchMode=yes", *words, "--", target, in_sh(line)]


def build_session(sockets: Mapping[Host, str], run: str) -> str:
    """Create the session afresh, with one window per host; returns its name.

    ``sockets``: of the run's tmux server on each host where it is alive.

    Raises:
        UserError: tmux is not installed on this machine, or fails.
    """
    import libtmux
    from libtmux.exc import LibTmuxException, TmuxCommandNotFound

    os.environ.pop("TMUX", None)
    remove_dead_sockets()
    first, *others = sockets
    name, logs = tmux_session(run), command_to_type("logs", file_of(first), run)
    try:
        server = libtmux.Server(socket_name=operator_socket(run), config_file="/dev/null")
        session = server.new_session(
            name,
            attach=False,
            kill_session=True,
            window_name=first.name,
            window_command=window_command(first, sockets[first], writable=False),
        )
        session.set_option("status-right-length", 60)
        session.set_option("status-right", "Ctrl-b d leaves; the run continues")
        for host in others:
            session.new_window(
                host.name, attach=False, window_shell=window_command(host, sockets[host], writable=False)
            )
    except TmuxCommandNotFound:
        raise UserError(f"attach: this machine has no tmux; install it, or use `{logs} -f`") from None
    except LibTmuxException as error:
        raise UserError(f"attach: tmux could not create the session ({error}); try `{logs} -f`") from None
    return name
