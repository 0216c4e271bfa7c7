"""A tmux session on this machine, with a window for each host of a run. The only module that imports libtmux."""

import os
import shlex
from collections.abc import Sequence

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import given
from llama405b_tools.hosts.fleet import is_local
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.hosts.typed import file_of, to_type
from llama405b_tools.remote.tmux import remove_dead_sockets, tmux_session, tmux_socket
from llama405b_tools.text.shell import in_sh


def operator_socket(run: str) -> str:
    """Name the operator's own tmux server for a run: never the run's, which may be on this machine too."""
    return f"{tmux_socket(run)}-attach"


def window_command(host: Host, run: str, *, writable: bool) -> str:
    """Return the shell line that attaches to a host's session."""
    inner = ["tmux", "-u", "-L", tmux_socket(run), "attach", "-t", f"={tmux_session(host.name)}"]
    if not writable:
        inner.append("-r")
    if is_local(host):
        return "unset TMUX; exec " + shlex.join(inner)
    options = {"-F": os.environ.get("LLAMA405B_SSH_CONFIG", ""), "-p": given("{}", host.port)}
    words = [word for option, value in options.items() if value for word in (option, value)]
    target = given("{}@", host.user) + host.name
    ssh = ["ssh", "-t", "-o", "BatchMode=yes", *words, "--", target, in_sh(shlex.join(inner))]
    return f"unset TMUX; exec {shlex.join(ssh)}"


def build_session(hosts: Sequence[Host], run: str) -> str:
    """Create the session afresh, with one window per host; returns its name.

    Raises:
        UserError: tmux is not installed on this machine, or fails.
    """
    import libtmux
    from libtmux.exc import LibTmuxException, TmuxCommandNotFound

    os.environ.pop("TMUX", None)
    remove_dead_sockets()
    name, logs = tmux_session(run), to_type("logs", file_of(hosts[0]), run)
    try:
        server = libtmux.Server(socket_name=operator_socket(run), config_file="/dev/null")
        session = server.new_session(
            name,
            attach=False,
            kill_session=True,
            window_name=hosts[0].name,
            window_command=window_command(hosts[0], run, writable=False),
        )
        session.set_option("status-right-length", 60)
        session.set_option("status-right", "Ctrl-b d leaves; the run continues")
        for host in hosts[1:]:
            session.new_window(host.name, attach=False, window_shell=window_command(host, run, writable=False))
    except TmuxCommandNotFound:
        raise UserError(f"attach: this machine has no tmux; install it, or use `{logs} -f`") from None
    except LibTmuxException as error:
        raise UserError(f"attach: tmux could not create the session ({error}); try `{logs} -f`") from None
    return name
