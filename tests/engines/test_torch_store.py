# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's store, where the process that keeps it stands still."""

from __future__ import annotations

import threading
import time

import pytest
from fanin.torch import _world


class Still:
    """Answers nothing until it goes on."""

    def __init__(self):
        self.goes_on = threading.Event()

    def set(self, key, value):
        self.goes_on.wait(60)

    def check(self, keys):
        raise KeyError(keys[0])


def test_a_store_that_stands_still(monkeypatch, caplog):
    monkeypatch.setattr(_world, "_QUIET", 0.05)
    monkeypatch.setattr(_world, "_WAIT", 0.2)
    below = Still()
    store = _world.Store(below, 3)
    with pytest.raises(RuntimeError, match="nothing came in 0 s"):
        store.set("a", "1")
    (line,) = caplog.messages
    assert "rank 3 waits for torch.distributed's store to answer" in line
    monkeypatch.setattr(_world, "_WAIT", 60.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="it is silent"):  # who has given up is not asked again
        store.check(["a"])
    assert time.monotonic() - began < 30
    below.goes_on.set()
    assert store._silent is not None
    store._silent.result(30)
    store.set("a", "2")
    with pytest.raises(KeyError):
        store.check(["a"])
