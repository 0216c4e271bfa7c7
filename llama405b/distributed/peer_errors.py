"""Errors of another rank: one that refused its input, and one that went away. Then its message matters, not this one's.

The only place that parses messages of gloo, NCCL and torch's store; ``tests/data/foreign/lost-peer`` has recordings.
"""

import torch.distributed as dist

from llama405b.contract.errors import UserError

SIGNS = (  # parts of messages that occur in no other message
    "Connection closed by peer",  # gloo
    "Connection reset",  # gloo, torch's store
    "Broken pipe",  # gloo, torch's store
    "Timed out waiting",  # gloo, if a peer is silent
    "Socket Timeout",  # torch's store
    "wait timeout after",  # torch's store, if nobody came
    "timed out",  # NCCL's watchdog, torch's store
)


def says_lost_peer(message: str) -> bool:
    """Return whether a message is of a known form."""
    return any(sign in message for sign in SIGNS)


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error means that a peer went away, by its type or message."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError) or says_lost_peer(
        str(error)
    )


class FollowedError(UserError):
    """Another rank refused its input, so all ranks stop."""

    def __init__(self, peer: int, words: str) -> None:
        super().__init__(f"rank {peer} failed: {words}")
        self.peer, self.words = peer, words
