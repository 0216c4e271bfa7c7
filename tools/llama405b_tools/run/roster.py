"""Which of its hosts a guarded run uses: all, or those that are left while others stay lost. Knows times and names alone."""

from collections.abc import Collection, Sequence

from llama405b_tools.hosts.inventory import Host


class Roster:
    """The hosts of a run that may shrink and grow again."""

    def __init__(self, hosts: Sequence[Host], least: int, after_s: float) -> None:
        """Begin with all of them.

        ``least``: hosts that the run needs; 0: all. ``after_s``: how long one is lost before the run does without it, and how long
        it is back before the run takes it again.
        """
        self.hosts = list(hosts)
        self.least, self.after_s = least, after_s
        self.lost_at: dict[str, float] = {}
        self.back_at: dict[str, float] = {}
        self.left_out: frozenset[str] = frozenset()  # of the attempt that runs

    def note_lost(self, unreached: Collection[str], now_s: float) -> None:
        """Note which hosts could not be reached in a try to end what is left on all of them."""
        self.lost_at = {name: self.lost_at.get(name, now_s) for name in unreached}
        self.back_at = {name: at for name, at in self.back_at.items() if name not in self.lost_at}

    def note_back(self, reached: Collection[str], now_s: float) -> None:
        """Note which of the hosts that are left out can be reached."""
        self.back_at = {name: self.back_at.get(name, now_s) for name in reached}

    def grows(self, now_s: float) -> bool:
        """Whether a host that is left out has been back for long enough."""
        return any(now_s >= at + self.after_s for at in self.back_at.values())

    def chosen(self, now_s: float) -> list[Host]:
        """Return the hosts to start on: all, but for those that stay lost, as long as enough are left."""
        if not self.least:
            return self.hosts
        stay_lost = {name for name, at in self.lost_at.items() if now_s >= at + self.after_s}
        stay_lost |= self.left_out - self.back_at.keys()
        left = [host for host in self.hosts if host.name not in stay_lost]
        return left if len(left) >= self.least else self.hosts

    def started(self, hosts: Sequence[Host]) -> None:
        """Note on which hosts an attempt runs."""
        used = {host.name for host in hosts}
        self.left_out = frozenset(host.name for host in self.hosts if host.name not in used)
        self.lost_at, self.back_at = {}, {}

    def not_started(self, hosts: Sequence[Host]) -> None:
        """Note that no attempt could be started on these hosts: do without those that have just come back, if there are some."""
        for host in hosts:
            self.back_at.pop(host.name, None)
