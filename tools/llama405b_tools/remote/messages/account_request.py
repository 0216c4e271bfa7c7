"""Asking the head of a run for what only it knows: what its time went into. Pure."""

import dataclasses

from llama405b.contract.accounting import Account


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRequest:
    """Ask the host that has rank 0."""

    run: str
    host: str  # its name


@dataclasses.dataclass(frozen=True, slots=True)
class AccountReply:
    """The account; None if this host has no metrics of the run."""

    account: Account | None
