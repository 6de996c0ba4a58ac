# SPDX-License-Identifier: Apache-2.0
"""How a worker's weights stand: what it holds, what it reads ahead, what its last update did.

Asked by ``/collective_rpc`` with the method ``fanin_weights_state``, between two steps of the
engine; a worker answers at once. :mod:`fanin.sync` waits so for what is read ahead, and knows the
bytes and the seconds of an update. Imports neither PyTorch nor vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fanin.engine.spares import memory_left
from fanin.errors import HostError

METHOD = "fanin_weights_state"

# Of what is free; the rest is for whatever else the host does meanwhile.
_SHARE = 0.8


def fanin_weights_state(worker: Any) -> dict[str, Any]:
    """Plain values, of the model that the worker serves; a method of vLLM's workers.

    Returns:
        step: of the last update that ended well; None: the weights are those of the start.
        dirty: why the weights are not whole, "" if they are.
        ahead: the step that is read ahead, with its state ("reading", "ready", "failed"); None: no
            step.
        last: what the last update did; None: there was none.
        kept: paths of tensors that no update fills, by ``keep``.
        external_kv: whether the engine has a connector.
        drafts: whether the worker has a draft model.
        draft_step: of that model's last update.
        basis: another text after each init, sleep and reload, and when the trainer publishes other
            tensors. A proof of the weights before is then no proof of the next step.
    """
    engine = getattr(worker, "weight_transfer_engine", None)
    if engine is None or not hasattr(engine, "state"):
        return {"step": None, "dirty": "", "ahead": None, "last": None, "kept": []}
    found: dict[str, Any] = engine.state()
    draft = getattr(worker, "get_draft_model", None)
    found["drafts"] = callable(draft) and draft() is not None
    return found


def require_host_room(wanted: int, workers: int, root: Path = Path("/")) -> None:
    """Raises HostError unless *workers* processes can have *wanted* bytes of host memory each.

    Linux gives away memory that it does not have, and ends a process that uses it.

    Args:
        root: the folder of the files that say how much memory there is.
    """
    free = min(memory_left(root), default=None)
    if free is not None and wanted * workers > free * _SHARE:
        raise HostError.make(
            f"{wanted / 1e9:.1f} GB for each of {workers} workers, and {free / 1e9:.1f} GB of host"
            " memory are free",
            "update without prefetch",
            key="prefetch",
        )
