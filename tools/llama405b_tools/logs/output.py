"""How log entries look on a terminal, in a pipe and in files: filtered, folded, colored, cleaned, redacted."""

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import counted, given
from llama405b.contract.units import seconds
from llama405b_tools.remote.messages.stream import StreamRequest
from llama405b_tools.text.clean import clean, redact
from llama405b_tools.text.fold import Fold, OneByOne, group_text, where_of
from llama405b_tools.text.merge import Entry

MOST_BYTES = 1 << 20  # of each file that wait on its host while following
NOTE_EVERY_S = 5.0  # about lines that were left out
HOST_COLORS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


class Show:
    """Filters, folds, formats and prints entries."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Check the options.

        Raises:
            UserError: An option is invalid.
        """
        self.args, self.out = args, sys.stdout
        self.include, self.exclude = _regexes(args.include, "--include"), _regexes(args.exclude, "--exclude")
        self.highlight = _regexes(args.highlight, "--highlight")
        self.ranks = _ranks(args.rank)
        self.since_s = seconds(args.since or "0", "--since")
        self.attempt = _attempt(args.attempt)
        if args.tail is not None and args.tail < 0:
            raise UserError(f"--tail: {args.tail} is negative; use 0 or more")
        if args.follow and args.first_error:
            raise UserError("--first-error cannot be used with -f; omit one of them")
        self.color = args.output == "text" and self.out.isatty() and not os.environ.get("NO_COLOR")
        self.show = {"text": self._lines, "json": self._json, "raw": self._raw}[args.output]
        self.fold = Fold() if args.fold else OneByOne()
        self.saved: set[Path] = set()
        self.hosts: dict[str, int] = {}
        self.left_out: dict[str, int] = {}  # lines, by host
        self.noted, self.note_at = dict[str, int](), 0.0

    def request(self, run: str, *, follow: bool, forever: bool) -> StreamRequest:
        """Build the request to the hosts."""
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
            most_bytes=MOST_BYTES if follow else 0,
        )

    def entries(self, entries: Iterator[Entry]) -> None:
        """Show entries, in order of arrival."""
        for entry in entries:
            if self.ranks and entry.rank not in self.ranks:
                continue
            if self.args.save:
                self._save(entry)
            if self._is_wanted(entry.text):
                for group in self.fold.push(entry):
                    self.show(group)
        if self.args.follow:
            for group in self.fold.older_than(time.time() - self.fold.window_s):
                self.show(group)
        self.out.flush()

    def _is_wanted(self, text: str) -> bool:
        included = not self.include or any(regex.search(text) for regex in self.include)
        return included and not any(regex.search(text) for regex in self.exclude)

    def dropped(self, counts: Mapping[str, int]) -> None:
        """Note now and then how many lines come too fast to be shown here."""
        self.left_out = dict(counts)
        if time.monotonic() >= self.note_at:
            self._note_left_out()

    def _note_left_out(self) -> None:
        for host, count in self.left_out.items():
            if more := count - self.noted.get(host, 0):
                why = "they come faster than they can be shown here; `logs` without -f shows them all"
                self.note(f"{host}: {counted(more, 'line')} left out: {why}")
                self.noted[host], self.note_at = count, time.monotonic() + NOTE_EVERY_S

    def note(self, text: str) -> None:
        """Print a note about the reading itself."""
        print(f"- {text}", file=sys.stderr)

    def close(self) -> None:
        """Show what remains."""
        self._note_left_out()
        for group in self.fold.flush():
            self.show(group)
        with contextlib.suppress(BrokenPipeError):
            self.out.flush()

    def _raw(self, group: Sequence[Entry]) -> None:
        text = group[0].text
        self.out.write(f"{clean(text) if self.out.isatty() else redact(text)}\n")

    def _json(self, group: Sequence[Entry]) -> None:
        entry = group[0]
        record = {"time": round(entry.time, 3), "host": entry.host, "rank": entry.rank, "stream": entry.stream}
        if len(group) > 1:
            record |= {"hosts": sorted({e.host for e in group}), "ranks": sorted({e.rank for e in group})}
        self.out.write(json.dumps(record | {"text": clean(group_text(group))}, ensure_ascii=False) + "\n")

    def _lines(self, group: Sequence[Entry]) -> None:
        entry = group[0]
        clock = time.strftime("%H:%M:%S", time.localtime(entry.time))
        prefix = f"{clock} {where_of(group)} {entry.stream:3}"
        if self.color:
            color = HOST_COLORS[self.hosts.setdefault(entry.host, len(self.hosts)) % len(HOST_COLORS)]
            prefix = f"\x1b[{color}m{prefix}\x1b[0m"
        for line in clean(group_text(group)).split("\n"):
            self.out.write(f"{prefix} │ {self._lit(line)}\n")

    def _lit(self, line: str) -> str:
        for regex in self.highlight if self.color else ():
            line = regex.sub(lambda match: given("\x1b[1;7m{}\x1b[0m", match[0]), line)
        return line

    def _save(self, entry: Entry) -> None:
        name = f"rank-{entry.rank}.{entry.stream}.log" if entry.rank >= 0 else "torchrun.log"
        path = self.args.save / entry.host / name
        mode = "a" if path in self.saved else "w"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode, encoding="utf-8") as file:  # one at a time: there are many
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
            raise UserError(f"--rank: {text!r} is not a valid rank list; write 3 or 0-7,12")
        ranks |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranks


def _attempt(text: str) -> int:
    if text == "all":
        return -1
    if not text.isdecimal():
        raise UserError(f"--attempt: {text!r} is not a valid attempt; write a number, or all")
    return int(text)
