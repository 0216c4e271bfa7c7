"""What the operator asks of a run that trains, as rank 0 finds it between two steps. Knows files; carries nothing out."""

import time
from collections.abc import Iterator
from pathlib import Path

from llama405b.contract import reader
from llama405b.contract.paths import RunDir
from llama405b.contract.requests import RunRequest

LOOK_EVERY_S = 1.0  # a directory on a network disk is not free
MAX_STEPS = 100  # of one profile: a trace of more cannot be opened


class Inbox:
    """The requests of this attempt; what was asked before it began is not its business."""

    def __init__(self, run: RunDir) -> None:
        self.directory = run.requests
        self.seen = set(self._names())
        self.looked_at = 0.0

    def new(self) -> Iterator[RunRequest]:
        """Requests that came since the last look; files that are not requests are passed over."""
        if time.monotonic() < self.looked_at + LOOK_EVERY_S:
            return
        self.looked_at = time.monotonic()
        for path in self._names():
            if path in self.seen:
                continue
            self.seen.add(path)
            try:
                request = reader.loads(RunRequest, path.read_bytes(), path.name)
            except (OSError, reader.MalformedError):
                continue
            if request.id == path.stem:
                yield request

    def _names(self) -> list[Path]:
        try:
            return sorted(path for path in self.directory.iterdir() if path.suffix == ".json")
        except OSError:
            return []
