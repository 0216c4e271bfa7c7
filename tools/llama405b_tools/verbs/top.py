"""Show every host, GPU and rank, the training and its logs on one screen.

HOSTS is a hosts file or host names; --replay needs none. Nothing is installed on a host: a small sampler is sent over SSH
and exits with the connection. Exit code (on quitting, and with --once, --json and --watch): 0 healthy, 1 degraded,
3 hung, failed or down.
"""

import argparse
import contextlib
import functools
import io
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from llama405b.contract import reader
from llama405b.contract.errors import GOOD, UserError, seconds
from llama405b.settings.command import OneLineParser
from llama405b.spec.plan import check_run_name
from llama405b_tools.hosts.fleet import Fleet, file_of, hosts_argument, program_name
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run import screen
from llama405b_tools.run.backends import Backend, OnHosts, backend_of
from llama405b_tools.run.judge import HANG_AFTER_S
from llama405b_tools.run.query import no_such_run
from llama405b_tools.top import event_sources, keys, remembered
from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.ui import SORTS, THEMES, theme
from llama405b_tools.top.event_sources import EventSource, Live, Recorder, Replay
from llama405b_tools.top.exporter import Changes, Exporter, split
from llama405b_tools.top.remembered import READ_AGAIN, in_browser, on_signals
from llama405b_tools.top.session import FIRST_S, PLAIN_WIDTH, Session
from llama405b_tools.top.state.picture import HostState, Picture
from llama405b_tools.verbs.arguments import HERE, hosts_of


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = _parser().parse(argv)
    _check(args)
    hang_after_s = seconds(args.hang_after, "--hang-after")
    if args.serve and not in_browser():
        return _serve(args.serve, argv)
    if args.replay:
        return _show(args, event_sources.replay(args.replay, args.speed), None, hang_after_s)
    backend: Backend = OnHosts(args.run, Path("hosts"))
    if not args.hosts:
        backend = backend_of(args.run, Path("hosts"))
    hosts = backend.hosts() if backend.elsewhere else named_hosts(args.hosts)
    with Fleet(hosts) as fleet:
        live = Live(fleet, backend.run, args.interval, elsewhere=backend.elsewhere)
        code = _show(args, live, fleet, hang_after_s, in_job=backend.elsewhere)
    if code == READ_AGAIN:
        os.execv(sys.executable, sys.orig_argv)  # restart with the same command line
    return code


def _check(args: argparse.Namespace) -> None:
    least, most = event_sources.MIN_INTERVAL_S, event_sources.MAX_INTERVAL_S
    own = args.hosts or args.run or args.record
    refusals = (
        (not least <= args.interval <= most, f"--interval: {args.interval:g} s; use {least:g} to {most:g}"),
        (not 0 < args.speed < 1e6, f"--speed: {args.speed:g}; use a positive number"),
        (args.watch is not None and not args.watch > 0, f"--watch: {args.watch} s; use a positive number"),
        (args.replay and own, "--replay: a recording has its own hosts and run; remove HOSTS, --run and --record"),
        (
            args.metrics and (args.json or args.once) and not args.watch,
            "--metrics needs a running cluster-top; remove --once or --json, or add --watch",
        ),
        (
            args.on_change and (args.json or args.once) and not args.watch,
            "--on-change needs repeated samples; remove --once or --json, or add --watch",
        ),
        (
            args.serve and (args.json or args.once or args.watch or args.plain or args.record or args.metrics),
            "--serve shows the screen; remove --once, --json, --watch, --plain, --record and --metrics",
        ),
        (args.speed != 1.0 and not args.replay, "--speed works only with --replay; remove it"),
    )
    for refused, why in refusals:
        if refused:
            raise UserError(why)
    if args.run is not None:
        check_run_name(args.run)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="cluster-top",
        description=__doc__,
    )
    add = parser.add_argument
    add("hosts", nargs="*", metavar="HOSTS", help="hosts file or host names [hosts]")
    add(
        "--run",
        help="name of the run [the newest live run, else the newest; other verbs refuse to choose between live runs]",
    )
    add("--interval", type=float, default=2.0, metavar="S", help="seconds between samples [2]")
    add(
        "--hang-after",
        default=f"{HANG_AFTER_S:.0f}s",
        metavar="TIME",
        help=f"show a rank as hung when it is silent this long and for 5 steps; unlike launch's, it stops nothing [{HANG_AFTER_S:.0f}s]",
    )
    add("--sort", choices=SORTS, help="order of the hosts [on a terminal as last time, else worst]")
    add("--filter", default="", metavar="TEXT", help="show only hosts whose name, state or notes contain TEXT")
    add("--odd", action="store_true", help="show only unhealthy hosts")
    add(
        "--theme",
        choices=THEMES,
        help="colors for a dark or light background [on a terminal as last time, else from COLORFGBG]",
    )
    add("--once", action="store_true", help="print once and exit")
    add("--json", action="store_true", help="print JSON once (docs/cluster-top-json.md has the schema)")
    add("--watch", type=float, metavar="S", help="print every S seconds")
    add("--plain", action="store_true", help="print plain text (once, unless --watch is given)")
    add(
        "--on-change",
        default="",
        metavar="CMD",
        help="run CMD with /bin/sh when the verdict changes, as launch's --notify does (sets LLAMA405B_EVENT, _RUN, _MESSAGE)",
    )
    add(
        "--read-only",
        action=argparse.BooleanOptionalAction,
        help="disable the keys that act on hosts and runs [default with --serve; --no-read-only enables them]",
    )
    add("--serve", metavar="[ADDR:]PORT", help="serve the screen to browsers; without ADDR only on this machine")
    add("--metrics", metavar="[ADDR:]PORT", help="serve Prometheus metrics; without ADDR only on this machine")
    add("--record", type=Path, metavar="FILE", help="record all received data to FILE (.gz compresses)")
    add("--replay", metavar="FILE", help="play back a recording; demo is a simulated incident on 64 GPUs")
    add("--speed", type=float, default=1.0, metavar="X", help="playback speed of --replay [1]")
    return parser


def _serve(where: str, argv: Sequence[str]) -> int:
    """Serve the screen with the same arguments; actions are disabled unless enabled explicitly."""
    address, port = split("--serve", where)
    try:
        from llama405b_tools.top.serve import serve
    except ModuleNotFoundError as missing:
        raise UserError(
            f"--serve needs {missing.name}, which is not installed; `{shlex.quote(sys.executable)} -m pip install "
            "textual-serve` installs it"
        ) from None
    serve(address, port, ["--read-only", *argv], screen.show)  # a --no-read-only in argv comes later and wins
    return GOOD


def named_hosts(words: Sequence[str]) -> tuple[Host, ...]:
    """Return the named hosts, or those of ./hosts."""
    if not words and not HERE.exists():
        raise UserError("hosts: no such file; name a hosts file or hosts, or try `cluster-top --replay demo`")
    return hosts_of(words or HERE)


def _show(
    args: argparse.Namespace, source: EventSource, fleet: Fleet | None, hang_after_s: float, *, in_job: bool = False
) -> int:
    with contextlib.ExitStack() as leaving:
        leaving.callback(source.close)
        recorder = Recorder(args.record, source) if args.record else None
        session = leaving.enter_context(contextlib.closing(Session(source, fleet, hang_after_s, recorder)))
        if recorder:
            leaving.callback(recorder.close)  # closed first (last callback): closing the others may take a while
        on_signals(sys.exit)
        files = files_of(fleet) if fleet else []
        session.cluster.wanted = args.run or ""
        session.cluster.program, session.cluster.hosts_argument = program_name(), "".join(map(hosts_argument, files))
        streams = (sys.stdin, sys.stdout, sys.stderr)  # textual reads stdin and draws on stderr
        at_terminal = all(each.isatty() for each in streams) and os.environ.get("TERM", "") not in ("", "dumb")
        prints = args.json or args.once or args.plain or args.watch or not (at_terminal or in_browser())
        if not prints:
            remembered.recall().put(session.ui)
        session.ui.sort = args.sort or session.ui.sort
        session.ui.theme = args.theme or session.ui.theme
        session.ui.filter = args.filter
        session.ui.odd_only = args.odd
        exporter = leaving.enter_context(contextlib.closing(Exporter(args.metrics))) if args.metrics else None
        session.ui.refusals = keys.refusals(
            is_live=bool(fleet), read_only=args.read_only, has_file=bool(files), in_job=in_job, in_browser=in_browser()
        )
        _await_run(session)
        if prints:
            return _print(args, session, exporter)
        from llama405b_tools.top.app import run_app

        return run_app(session, files, args.on_change, exporter)


def files_of(fleet: Fleet) -> list[Path]:
    """Return the hosts files of a fleet's hosts; none for host names or in a Slurm job."""
    return sorted({file for host in fleet.hosts.values() if (file := file_of(host)) and file.is_file()})


def _print(args: argparse.Namespace, session: Session, exporter: Exporter | None) -> int:
    """Print once, or every ``--watch`` seconds while stdout is open; with only ``--metrics``, print nothing."""
    goes_on = bool(args.watch or args.metrics)
    if goes_on:
        session.keep()
    prints = bool(args.watch or not args.metrics or args.json or args.once or args.plain)
    _await_all(session, watches=goes_on)
    changes = Changes(args.on_change, complain=functools.partial(screen.show, error=True))
    while True:
        pic = session.picture(logs=False)
        changes.see(pic)
        if exporter:
            exporter.pic = pic
        is_read = _put(args, session, pic) if prints else True
        if not is_read or not goes_on or session.source.done():
            return pic.exit_code
        _pass(session, args.watch or session.source.interval_s)


def _await_run(session: Session) -> None:
    """Wait until a host reports the run of --run, if given."""
    wanted, hosts = session.cluster.wanted, session.cluster.hosts.values()
    if not session.fleet or not wanted:
        return

    def is_found() -> bool:
        return any(host.run(wanted) for host in hosts)

    _await_hosts(session, FIRST_S, is_found)
    if is_found():
        return
    pic = session.picture(logs=False)
    answered = [row for row in pic.hosts if row.state is HostState.OK]
    if answered and pic.training is None:
        frames = [session.cluster.hosts[row.name].frame for row in answered]
        known = dict.fromkeys(name for frame in frames for name in frame.runs)
        lost = {row.name: row.why for row in pic.hosts if row not in answered}
        raise no_such_run(session.fleet, wanted, list(known), lost)


def _pass(session: Session, seconds: float) -> None:
    """Process events for this many seconds."""
    until = session.source.now() + seconds
    while session.source.now() < until and not session.source.done():
        session.advance(min(until, session.source.now() + 0.5))


def _await_all(session: Session, *, watches: bool) -> None:
    """Wait for two frames of each host (rates need two) or its failure; read a recording to its end."""
    if isinstance(session.source, Replay) and not watches:
        for event in session.source.to_the_end():
            session.take(event)
            session.look(event)
        return
    _await_hosts(session, FIRST_S + 2 * session.source.interval_s)


def _await_hosts(session: Session, within_s: float, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Process events until every host sent two frames or is unreachable, or ``is_enough()``."""
    source, hosts = session.source, session.cluster.hosts.values()
    deadline = source.now() + within_s
    while source.now() < deadline and not source.done() and not is_enough():
        if all(host.is_settled for host in hosts):
            return
        session.advance(source.now() + 0.2)


def _put(args: argparse.Namespace, session: Session, pic: Picture) -> bool:
    if args.json:
        return screen.show(reader.dumps_whole(pic))
    tty = sys.stdout.isatty()
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
    color: Literal["auto"] | None = "auto" if tty and not args.plain else None
    look = theme(remembered.theme_for(session.ui.theme), remembered.color_count() if color else 0)
    text = io.StringIO()  # not written directly: on a closed pipe, rich would exit in its own way
    console = Console(
        file=text,
        width=width,
        color_system=color,
        force_terminal=tty,
        highlight=False,
        legacy_windows=False,
        theme=look,
    )
    for line in panels.listed(pic, session.ui, width):
        console.print(line, no_wrap=True, crop=tty, overflow="ellipsis" if tty else "ignore", soft_wrap=not tty)
    return screen.show(text.getvalue(), end="\n" if args.watch else "")
