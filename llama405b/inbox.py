"""What the operator asks of a run that trains, as rank 0 finds it between two steps. Knows files; carries nothing out."""

import time
from collections.abc import Iterator
from pathlib import Path

from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.requests import RunRequest
from llama405b.ranks import Ranks

LOOK_EVERY_S = 1.0  # a directory on a network disk is not free
MAX_STEPS = 100  # of one profile: a trace of more cannot be opened


class Inbox:
    """The requests of this attempt; what was asked before it began is not its business."""

    def __init__(self, run: RunDir, me: Ranks) -> None:
        self.directory, self.me = run.requests, me
        self.seen = set(self._names())
        self.looked_at = 0.0

    def new(self) -> Iterator[RunRequest]:
        """Requests that came since the last look, on rank 0; files that are not requests are passed over."""
        if not self.me.leads or time.monotonic() < self.looked_at + LOOK_EVERY_S:
            return
        self.looked_at = time.monotonic()
        for path in [path for path in self._names() if path not in self.seen]:
            self.seen.add(path)
            request = read_record(RunRequest, path)
            if request and request.id == path.stem:
                yield request

    def _names(self) -> list[Path]:
        try:
            return sorted(path for path in self.directory.iterdir() if path.suffix == ".json")
        except OSError:
            return []
