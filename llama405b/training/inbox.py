"""The operator's requests to a training run, as rank 0 finds them between steps. Knows files; carries nothing out."""

import time
from collections.abc import Iterator
from pathlib import Path

from llama405b.contract.files import read_record
from llama405b.contract.paths import RunDir
from llama405b.contract.records import RunRequest
from llama405b.distributed.ranks import Rank

LOOK_EVERY_S = 1.0  # listing a directory on a network disk costs time
MAX_STEPS = 100  # per profile: a longer trace cannot be opened


class Inbox:
    """The requests of this attempt; earlier ones are ignored."""

    def __init__(self, run: RunDir, me: Rank) -> None:
        self.directory, self.me = run.requests, me
        self.seen = set(self._names())
        self.looked_at = 0.0

    def new(self) -> Iterator[RunRequest]:
        """Yield the requests since the last look, on rank 0; files that are not requests are skipped."""
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
