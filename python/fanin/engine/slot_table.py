# SPDX-License-Identifier: Apache-2.0
"""Slots that no adapter has, filled beside the engine before vLLM asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


class KeptSlot:
    """One slot that is kept for an adapter that comes. vLLM may take it back at any time."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._lock = threading.Lock()
        self._filled = False
        #: Set without the lock: who writes piece after piece could keep that from others for long.
        self._lost = False

    @property
    def filled(self) -> bool:
        """Whether it is whole, and nobody has taken it back."""
        return self._filled

    def fill(self, pieces: Iterable[Callable[[], None]]) -> bool:
        """Writes the slot, a piece at a time; False if it was taken back meanwhile.

        In any thread but the engine's.
        """
        for piece in pieces:
            with self._lock:
                if self._lost:
                    return False
                piece()
        with self._lock:
            self._filled = not self._lost
            return self._filled

    def lose(self) -> bool:
        """From now on nobody writes it; whether it was whole. Waits for one piece at most."""
        self._lost = True
        with self._lock:
            whole, self._filled = self._filled, False
            return whole


class SlotTable:
    """Those of one worker. Any thread, but for what is said of :meth:`keep`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, KeptSlot] = {}

    def indices(self) -> set[int]:
        with self._lock:
            return set(self._kept)

    def keep(self, index: int) -> KeptSlot:
        """Keeps a slot that no adapter has. In the engine's thread: it alone gives slots away."""
        seat = KeptSlot(index)
        with self._lock:
            self._kept[index] = seat
        return seat

    def give_up(self, seat: KeptSlot | None) -> bool:
        """Its keeper gives it up, or takes the seat; whether the slot is whole."""
        if seat is None:
            return False
        with self._lock:
            if self._kept.get(seat.index) is seat:
                del self._kept[seat.index]
        return seat.lose()

    def take_back(self, index: int) -> None:
        """vLLM is about to give that slot to another adapter."""
        with self._lock:
            seat = self._kept.get(index)
        self.give_up(seat)
