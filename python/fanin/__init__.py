# SPDX-License-Identifier: Apache-2.0
"""Fresh LoRA weights from all trainer ranks into inference engines, without files in between.

A trainer lends its weights by :class:`Server` (one a rank; ``fanin.torch.AdapterServer`` makes it
of a PyTorch model), an inference worker fetches them by :class:`Client`. Importing this package
loads neither the C library nor NumPy, PyTorch or vLLM.

Log lines of the C library come to the loggers ``fanin.server`` and ``fanin.client``. Its DEBUG
lines are made only if ``logging.getLogger("fanin")`` is at DEBUG when the first server or client is
made.
"""

from __future__ import annotations

from ._library import __version__, sweep_adapter_directory, trace
from ._records import (
    Entry,
    Owner,
    PublicationInfo,
    PullProgress,
    PullResult,
    RankInfo,
    RankProgress,
    RankState,
    WatchEvent,
)
from ._tensors import Box, PackedTensors, Shard, pack, shard_of
from .client import Client
from .errors import (
    CancelledError,
    ConnectionFailedError,
    FaninError,
    HostError,
    NotFoundError,
    PausedError,
    PeerError,
    ProcessError,
    PullAgainError,
    PullTimeoutError,
    RequestError,
    StaleError,
    StateError,
    SupersededError,
    UnreachableError,
)
from .relay import Relay, RelayStats
from .server import Server, ServerStats, Stream, publication_of
from .session import PullSession

__all__ = [
    "Box",
    "CancelledError",
    "Client",
    "ConnectionFailedError",
    "Entry",
    "FaninError",
    "HostError",
    "NotFoundError",
    "Owner",
    "PackedTensors",
    "PausedError",
    "PeerError",
    "ProcessError",
    "PublicationInfo",
    "PullAgainError",
    "PullProgress",
    "PullResult",
    "PullSession",
    "PullTimeoutError",
    "RankInfo",
    "RankProgress",
    "RankState",
    "Relay",
    "RelayStats",
    "RequestError",
    "Server",
    "ServerStats",
    "Shard",
    "StaleError",
    "StateError",
    "Stream",
    "SupersededError",
    "UnreachableError",
    "WatchEvent",
    "__version__",
    "pack",
    "publication_of",
    "shard_of",
    "sweep_adapter_directory",
    "trace",
]
