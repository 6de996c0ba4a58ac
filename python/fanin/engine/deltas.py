# SPDX-License-Identifier: Apache-2.0
"""Whether a worker asks for what a step has changed, or for the whole of it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

from fanin._records import DELTAS, PullResult
from fanin.engine.metrics import count_delta
from fanin.engine.trainers import Published
from fanin.errors import RequestError

_log = logging.getLogger("fanin.engine")

_SAID = (True, False, "auto")
# How the library says that the memory did not hold what a pull had brought there.
_UNEQUAL = "what patches had led to"
_UNEQUAL_MOST = 2


def check_deltas(said: Any, relay: str | None, mode: str) -> None:
    """Of init_info. Raises RequestError, naming the field."""
    problem, remedy = "", ""
    if not isinstance(said, (bool, str)) or said not in _SAID:
        problem, remedy = f"is {said!r}", 'give true, false or "auto"'
    elif said is True and relay is not None:
        problem = "is true, and relay is set: what relays hand on is whole"
        remedy = 'give one of them; FANIN_RELAY sets relay too, which {"relay": false} overrides'
    elif said is True and mode == "loader":
        problem = "is true in mode loader, which is given whole tensors"
        remedy = 'leave out {"mode": "loader"}'
    if problem:
        raise RequestError.make(f"init_info's deltas {problem}", remedy, key="deltas")


class Asking:
    """Whether pulls into one memory ask for deltas. One thread at a time.

    Args:
        said: init_info's deltas. True: always. "auto": of a launch whose ranks keep patches, until
            a pull shows that they are not read by streams, as only streams carry patches, or two
            pulls one after the other that somebody else writes the memory.
        verify: init_info's; None: as deltas are asked for.
        relay: whom what is read is handed on to, by whole units; None: nobody.
    """

    def __init__(self, said: Any, verify: bool | None, relay: str | None) -> None:
        self._said = said if relay is None else False
        self._verify = verify
        self._one_sided = ""  # a launch
        self._unequal = 0  # pulls in a row

    def asks(self, published: Published) -> bool:
        """Of what the trainer publishes now."""
        if self._said != "auto":
            return bool(self._said)
        told = DELTAS in published.metadata and published.world != self._one_sided
        return told and self._unequal < _UNEQUAL_MOST

    def options(self) -> dict[str, Any]:
        """Of a ``pull_into`` that asks."""
        return {"verify": self._verify, "deltas": True}

    def came(self, result: PullResult) -> None:
        """It has brought that."""
        counts.add(result)
        self._unequal = self._unequal + 1 if result.whole_because.startswith(_UNEQUAL) else 0
        if self._unequal == _UNEQUAL_MOST and self._said == "auto":
            _log.info("fanin: no deltas are asked for from now on: the engine writes what it holds")
        # Proofs of what was read whole are not for free.
        one_sided = [r for r in result.ranks if r.get("bytes") and r.get("path") != "stream"]
        if one_sided and self._said == "auto":
            path, self._one_sided = one_sided[0]["path"], result.world_id
            _log.info("fanin: no deltas are asked for from now on: ranks are read by %s", path)


class Counts:
    """Of all pulls of this process that asked for deltas. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deltas = self._saved = 0
        self._wholes: Counter[str] = Counter()

    def add(self, result: PullResult) -> None:
        """One more."""
        saved = 0 if result.whole_because else result.bytes - result.patch_bytes
        with self._lock:
            if result.whole_because:
                self._wholes[result.whole_because] += 1
            else:
                self._deltas += 1
                self._saved += saved
        count_delta(result.whole_because, saved)

    def told(self) -> dict[str, Any]:
        """Plain values: pulls that read patches, bytes that they have not read, wholes by cause."""
        with self._lock:
            wholes = dict(self._wholes)
            return {"pulls": self._deltas, "saved_bytes": self._saved, "wholes": wholes}


counts = Counts()
"""Of this process."""
