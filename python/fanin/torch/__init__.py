# SPDX-License-Identifier: Apache-2.0
"""The trainer's side for PyTorch: parameters, sharded as they are, read by workers.

The patch of a training loop, whose model is PEFT's and may be sharded by FSDP2::

    from fanin.torch import AdapterServer

    server = AdapterServer(model, base_port=6000)      # on every rank
    server.publish(0)
    for step in range(1, steps):
        ...
        with server.updating(step):
            optimizer.step()

:class:`WeightServer` does the same for all weights of a model. :func:`per_expert`, :func:`renamed`,
:func:`slot` and :func:`chain` make functions for ``names=``, and :mod:`fanin.torch.names` has more
of them. :func:`compact` puts small shards into few allocations, which GPU workers map faster.
PyTorch is imported when one of the two classes, or that function, is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fanin._lazy import lazily
from fanin.torch._names import NamesFunction, Slice, chain, on_disk, per_expert, renamed, slot

if TYPE_CHECKING:
    from fanin.torch._compact import Compacted, compact
    from fanin.torch._transform import Transform, Values, parts_of
    from fanin.torch.server import AdapterServer
    from fanin.torch.weights import WeightServer

__all__ = [
    "AdapterServer",
    "Compacted",
    "NamesFunction",
    "Slice",
    "Transform",
    "Values",
    "WeightServer",
    "chain",
    "compact",
    "on_disk",
    "parts_of",
    "per_expert",
    "renamed",
    "slot",
]

_PLACES = {"AdapterServer": "server", "WeightServer": "weights"}
_PLACES |= {"Compacted": "_compact", "compact": "_compact"}
_PLACES |= dict.fromkeys(("Transform", "Values", "parts_of"), "_transform")
__getattr__ = lazily(__name__, _PLACES)
