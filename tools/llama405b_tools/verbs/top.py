"""Show every host, GPU and rank, the training and its logs on one screen.

HOSTS is a hosts file or host names; --replay needs none. A small program runs on each host over SSH
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
from llama405b.contract.errors import EXIT_OK, UserError, parse_seconds
from llama405b.contract.software import DOCS
from llama405b.settings.parser import OneLineParser
from llama405b.spec.plan import check_run_name
from llama405b_tools.hosts.fleet import DEFAULT_HOSTS_FILE, Fleet, find_hosts_file, hosts_argument, program_name
from llama405b_tools.hosts.inventory import Host
from llama405b_tools.run import screen
from llama405b_tools.run.backends import Backend, HostsBackend, backend_of
from llama405b_tools.run.hang import HANG_AFTER_S
from llama405b_tools.run.query import no_such_run
from llama405b_tools.top import event_sources, keys, remembered
from llama405b_tools.top.draw import panels
from llama405b_tools.top.draw.ui import SORTS, THEMES, make_theme
from llama405b_tools.top.event_sources import EventSource, LiveSource, Recorder, ReplaySource
from llama405b_tools.top.exporter import Exporter, VerdictNotifier, parse_listen_address
from llama405b_tools.top.remembered import RELOAD_CODE, handle_signals, in_browser
from llama405b_tools.top.session import FIRST_S, PLAIN_WIDTH, Session
from llama405b_tools.top.state.picture import ClusterView, HostState
from llama405b_tools.verbs.arguments import resolve_hosts


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    args = _parser().parse(argv)
    _check_arguments(args)
    hang_after_s = parse_seconds(args.hang_after, "--hang-after")
    if args.serve and not in_browser():
        return _serve(args.serve, argv)
    if args.replay:
        return _start(args, event_sources.open_replay(args.replay, args.speed), None, hang_after_s)
    backend: Backend = HostsBackend(args.run, Path("hosts"))
    if not args.hosts:
        backend = backend_of(args.run, Path("hosts"))
    hosts = backend.hosts() if backend.has_local_files else named_hosts(args.hosts)
    with Fleet(hosts) as fleet:
        live = LiveSource(fleet, backend.run, args.interval, files_are_local=backend.has_local_files)
        code = _start(args, live, fleet, hang_after_s, in_job=backend.has_local_files)
    if code == RELOAD_CODE:
        os.execv(sys.executable, sys.orig_argv)  # restart with the same command line
    return code


def _check_arguments(args: argparse.Namespace) -> None:
    min_s, max_s = event_sources.MIN_INTERVAL_S, event_sources.MAX_INTERVAL_S
    live_options = args.hosts or args.run or args.record
    refusals = (
        (not min_s <= args.interval <= max_s, f"--interval: {args.interval:g} s; use {min_s:g} to {max_s:g}"),
        (not 0 < args.speed < 1e6, f"--speed: {args.speed:g}; use a positive number"),
        (args.watch is not None and not args.watch > 0, f"--watch: {args.watch} s; use a positive number"),
        (
            args.replay and live_options,
            "--replay: a recording has its own hosts and run; remove HOSTS, --run and --record",
        ),
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
    for is_refused, why in refusals:
        if is_refused:
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
    add("--unhealthy", action="store_true", help="show only unhealthy hosts")
    add(
        "--theme",
        choices=THEMES,
        help="colors for a dark or light background [on a terminal as last time, else from COLORFGBG]",
    )
    add("--once", action="store_true", help="print once and exit")
    add("--json", action="store_true", help=f"print JSON once ({DOCS}/cluster-top-json.md has the schema)")
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
    add("--record", type=Path, metavar="FILE", help="record all received data to FILE (.gz and .xz compress)")
    add("--replay", metavar="FILE", help="play back a recording; demo is a simulated incident on 64 GPUs")
    add("--speed", type=float, default=1.0, metavar="X", help="playback speed of --replay [1]")
    return parser


def _serve(listen_address: str, argv: Sequence[str]) -> int:
    """Serve the screen with the same arguments; actions are disabled unless enabled explicitly."""
    address, port = parse_listen_address("--serve", listen_address)
    try:
        from llama405b_tools.top.serve import serve
    except ModuleNotFoundError as error:
        raise UserError(
            f"--serve needs {error.name}, which is not installed; `{shlex.quote(sys.executable)} -m pip install "
            "textual-serve` installs it"
        ) from None
    serve(address, port, ["--read-only", *argv], screen.show)  # a --no-read-only in argv comes later and wins
    return EXIT_OK


def named_hosts(words: Sequence[str]) -> tuple[Host, ...]:
    """Return the named hosts, or those of ./hosts."""
    if not words and not DEFAULT_HOSTS_FILE.exists():
        raise UserError("hosts: no such file; name a hosts file or hosts, or try `cluster-top --replay demo`")
    return resolve_hosts(words or DEFAULT_HOSTS_FILE)


def _start(
    args: argparse.Namespace, source: EventSource, fleet: Fleet | None, hang_after_s: float, *, in_job: bool = False
) -> int:
    with contextlib.ExitStack() as stack:
        stack.callback(source.close)
        recorder = Recorder(args.record, source) if args.record else None
        session = stack.enter_context(contextlib.closing(Session(source, fleet, hang_after_s, recorder)))
        if recorder:
            stack.callback(recorder.close)  # closed first (last callback): closing the others may take a while
        handle_signals(sys.exit)
        files = files_of(fleet) if fleet else []
        session.cluster.requested_run = args.run or ""
        session.cluster.program, session.cluster.hosts_argument = program_name(), "".join(map(hosts_argument, files))
        streams = (sys.stdin, sys.stdout, sys.stderr)  # textual reads stdin and draws on stderr
        is_terminal = all(stream.isatty() for stream in streams) and os.environ.get("TERM", "") not in ("", "dumb")
        prints = args.json or args.once or args.plain or args.watch or not (is_terminal or in_browser())
        if not prints:
            remembered.load_choices().apply(session.ui)
        session.ui.sort = args.sort or session.ui.sort
        session.ui.theme = args.theme or session.ui.theme
        session.ui.filter = args.filter
        session.ui.odd_only = args.unhealthy
        if args.metrics:
            session.on_view.append(stack.enter_context(contextlib.closing(Exporter(args.metrics))).show)
        session.ui.refusals = keys.refusals(
            is_live=bool(fleet), read_only=args.read_only, has_file=bool(files), in_job=in_job, in_browser=in_browser()
        )
        _await_run(session)
        if prints:
            return _print_views(args, session)
        from llama405b_tools.top.app import run_app

        return run_app(session, files, args.on_change)


def files_of(fleet: Fleet) -> list[Path]:
    """Return the hosts files of a fleet's hosts; none for host names or in a Slurm job."""
    return sorted({file for host in fleet.hosts.values() if (file := find_hosts_file(host)) and file.is_file()})


def _print_views(args: argparse.Namespace, session: Session) -> int:
    """Print once, or every ``--watch`` seconds while stdout is open; with only ``--metrics``, print nothing."""
    repeats = bool(args.watch or args.metrics)
    if repeats:
        session.start_history()
    prints = bool(args.watch or not args.metrics or args.json or args.once or args.plain)
    _await_first_frames(session, watches=repeats)
    session.on_view.append(VerdictNotifier(args.on_change, on_error=functools.partial(screen.show, error=True)).update)
    while True:
        view = session.make_view(logs=False)
        is_read = _print_view(args, session, view) if prints else True
        if not is_read or not repeats or session.source.is_done():
            return view.exit_code
        _advance_for(session, args.watch or session.source.interval_s)


def _await_run(session: Session) -> None:
    """Wait until a host reports the run of --run, if given."""
    run_name, hosts = session.cluster.requested_run, session.cluster.hosts.values()
    if not session.fleet or not run_name:
        return

    def is_found() -> bool:
        return any(host.run_report(run_name) for host in hosts)

    _await_hosts(session, FIRST_S, is_found)
    if is_found():
        return
    view = session.make_view(logs=False)
    answered_rows = [row for row in view.hosts if row.state is HostState.OK]
    if answered_rows and view.training is None:
        frames = [session.cluster.hosts[row.name].frame for row in answered_rows]
        run_names = dict.fromkeys(name for frame in frames for name in frame.runs)
        unreachable = {row.name: row.why for row in view.hosts if row not in answered_rows}
        unreachable |= {
            row.name: frame.run_fault for row, frame in zip(answered_rows, frames, strict=True) if frame.run_fault
        }
        raise no_such_run(session.fleet, run_name, list(run_names), unreachable)


def _advance_for(session: Session, seconds: float) -> None:
    """Process events for this many seconds."""
    deadline = session.source.now() + seconds
    while session.source.now() < deadline and not session.source.is_done():
        session.advance(min(deadline, session.source.now() + 0.5))


def _await_first_frames(session: Session, *, watches: bool) -> None:
    """Wait for two frames of each host (rates need two) or its failure; read a recording to its end."""
    if isinstance(session.source, ReplaySource) and not watches:
        for event in session.source.remaining_events():
            session.take(event)
            session.judge(event)
        return
    _await_hosts(session, FIRST_S + 2 * session.source.interval_s)


def _await_hosts(session: Session, within_s: float, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Process events until every host sent two frames or is unreachable, or ``is_enough()``."""
    source, hosts = session.source, session.cluster.hosts.values()
    deadline = source.now() + within_s
    while source.now() < deadline and not source.is_done() and not is_enough():
        if all(host.is_settled for host in hosts):
            return
        session.advance(source.now() + 0.2)


def _print_view(args: argparse.Namespace, session: Session, view: ClusterView) -> bool:
    if args.json:
        return screen.show(reader.dumps_all_fields(view))
    is_tty = sys.stdout.isatty()
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
    color: Literal["auto"] | None = "auto" if is_tty and not args.plain else None
    styles = make_theme(remembered.theme_for(session.ui.theme), remembered.color_count() if color else 0)
    text = io.StringIO()  # not written directly: on a closed pipe, rich would exit in its own way
    console = Console(
        file=text,
        width=width,
        color_system=color,
        force_terminal=is_tty,
        highlight=False,
        legacy_windows=False,
        theme=styles,
    )
    for line in panels.draw_listing(view, session.ui, width):
        console.print(
            line, no_wrap=True, crop=is_tty, overflow="ellipsis" if is_tty else "ignore", soft_wrap=not is_tty
        )
    return screen.show(text.getvalue(), end="\n" if args.watch else "")
