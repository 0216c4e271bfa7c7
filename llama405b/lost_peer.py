"""Whether an error says that another rank went away: then that rank's own words matter, not this one's.

The one place that reads what gloo, NCCL and torch's store write. ``tests/data/foreign/lost-peer`` has a recording of each.
"""

import torch.distributed as dist

SIGNS = (  # a part of the message that stands in no other
    "Connection closed by peer",  # gloo
    "Connection reset",  # gloo, torch's store
    "Broken pipe",  # gloo, torch's store
    "Timed out waiting",  # gloo, where a peer is silent
    "Socket Timeout",  # torch's store
    "wait timeout after",  # torch's store, where nobody came
    "timed out",  # NCCL's watchdog, torch's store
)


def says_lost_peer(message: str) -> bool:
    """Whether a message is of one of the known forms."""
    return any(sign in message for sign in SIGNS)


def is_lost_peer(error: Exception) -> bool:
    """Whether an error is that of a peer that went away, by its type or its message."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError) or says_lost_peer(
        str(error)
    )
