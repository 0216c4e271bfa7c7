"""How log entries look at a terminal, in a pipe and in files: filtered, folded, coloured, cleaned, redacted."""

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from llama405b.contract.errors import UserError
from llama405b_tools.remote.messages.stream import StreamRequest
from llama405b_tools.text.clean import clean, redact
from llama405b_tools.text.durations import seconds
from llama405b_tools.text.fold import Fold, text_of, where_of
from llama405b_tools.text.merge import Entry

HOST_COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


class Show:
    """Filters, folds, formats and prints entries."""

    def __init__(self, args: argparse.Namespace, out: TextIO | None = None) -> None:
        """Check the options.

        Raises:
            UserError: One will not do.
        """
        self.args, self.out = args, out or sys.stdout
        self.include, self.exclude = _regexes(args.include, "--include"), _regexes(args.exclude, "--exclude")
        self.highlight = _regexes(args.highlight, "--highlight")
        self.ranks = _ranks(args.rank)
        self.since_s = seconds(args.since, "--since") if args.since else 0.0
        if not (args.attempt == "all" or args.attempt.isdecimal()):
            raise UserError(f"--attempt: {args.attempt!r} is not a valid attempt; write a number, or all")
        self.attempt = -1 if args.attempt == "all" else int(args.attempt)
        if args.tail is not None and args.tail < 0:
            raise UserError(f"--tail: {args.tail} lines; it takes 0 or more")
        if args.follow and args.first_error:
            raise UserError("--first-error cannot be used with -f; the failure is there, or it is not")
        self.color = args.output == "text" and self.out.isatty() and not os.environ.get("NO_COLOR")
        self.fold = Fold() if args.fold else None
        self.saved: set[Path] = set()
        self.hosts: dict[str, int] = {}
        self.counted: dict[str, int] = {}

    def request(self, run: str, *, follow: bool, forever: bool) -> StreamRequest:
        """What the hosts are asked for."""
        args = self.args
        return StreamRequest(
            run,
            "",
            follow=follow,
            forever=forever,
            attempt=self.attempt,
            since_s=self.since_s,
            tail=args.tail,
            agent=args.agent,
            stderr=args.stderr,
        )

    def entries(self, entries: Iterator[Entry]) -> None:
        """Show entries, in the order in which they come."""
        for entry in entries:
            if self.ranks and entry.rank not in self.ranks:
                continue
            if self.args.save:
                self._save(entry)
            if self.include and not any(regex.search(entry.text) for regex in self.include):
                continue
            if any(regex.search(entry.text) for regex in self.exclude):
                continue
            for group in self.fold.push(entry) if self.fold else ([entry],):
                self._show(group)
        for group in self.fold.older_than(time.time() - self.fold.window_s) if self.fold and self.args.follow else ():
            self._show(group)
        self.out.flush()

    def dropped(self, counts: Mapping[str, int]) -> None:
        """Say what this terminal was too slow for."""
        for host, count in counts.items():
            if count > self.counted.get(host, 0):
                more = count - self.counted.get(host, 0)
                self.note(f"{host}: {more} entries not shown: this terminal is too slow for them")
                self.counted[host] = count

    def note(self, text: str) -> None:
        """Say something about the reading itself."""
        print(f"- {text}", file=sys.stderr)

    def close(self) -> None:
        """Show what is left."""
        for group in self.fold.flush() if self.fold else ():
            self._show(group)
        with contextlib.suppress(BrokenPipeError):
            self.out.flush()

    def _show(self, group: Sequence[Entry]) -> None:
        entry = group[0]
        if self.args.output == "raw":
            self.out.write(f"{clean(entry.text) if self.out.isatty() else redact(entry.text)}\n")
        elif self.args.output == "json":
            record = {"time": round(entry.time, 3), "host": entry.host, "rank": entry.rank, "stream": entry.stream}
            if len(group) > 1:
                record |= {"hosts": sorted({e.host for e in group}), "ranks": sorted({e.rank for e in group})}
            self.out.write(json.dumps(record | {"text": clean(self._text(group))}, ensure_ascii=False) + "\n")
        else:
            where = where_of(group)
            clock = time.strftime("%H:%M:%S", time.localtime(entry.time))
            prefix = f"{clock} {where} {entry.stream:3}"
            if self.color:
                color = HOST_COLORS[self.hosts.setdefault(entry.host, len(self.hosts)) % len(HOST_COLORS)]
                prefix = f"\x1b[{color}m{prefix}\x1b[0m"
            for line in clean(self._text(group)).split("\n"):
                self.out.write(f"{prefix} │ {self._lit(line)}\n")

    def _text(self, group: Sequence[Entry]) -> str:
        return text_of(group) if len(group) > 1 else group[0].text

    def _lit(self, line: str) -> str:
        for regex in self.highlight if self.color else ():
            line = regex.sub(lambda match: f"\x1b[1;7m{match[0]}\x1b[0m" if match[0] else "", line)
        return line

    def _save(self, entry: Entry) -> None:
        name = f"rank-{entry.rank}.{entry.stream}.log" if entry.rank >= 0 else "torchrun.log"
        path = self.args.save / entry.host / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(
                "a" if path in self.saved else "w", encoding="utf-8"
            ) as file:  # one at a time: they are many
                file.write(redact(entry.text) + "\n")
        except OSError as error:
            raise UserError(f"--save: {path} cannot be written ({error.strerror}); name another directory") from None
        self.saved.add(path)


def _regexes(texts: Sequence[str], flag: str) -> list[re.Pattern[str]]:
    found = []
    for text in texts:
        try:
            found.append(re.compile(text))
        except re.error as error:
            raise UserError(f"{flag}: {text!r} is not a valid regular expression ({error}); correct it") from None
    return found


def _ranks(text: str) -> set[int]:
    ranks: set[int] = set()
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if not match:
            raise UserError(f"--rank: {text!r} are no ranks; write 3 or 0-7,12")
        ranks |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranks
