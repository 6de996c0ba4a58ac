# SPDX-License-Identifier: Apache-2.0
"""Counters of pulls in vLLM's own ``/metrics``.

vLLM shows the default registry of ``prometheus_client`` of its API server's process, or, if
``PROMETHEUS_MULTIPROC_DIR`` is set, what all processes have written there; metrics that are made
in the API server appear in both. Without prometheus_client nothing is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from fanin.errors import FaninError

#: A pull's parts: from a tenth of a millisecond, by about a half of a decade.
_PHASE_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The counters, and the same numbers for ``/nixl/status``. Any thread; never blocks.

    registry: of prometheus_client; None: the default one.
    """

    def __init__(self, registry: Any = None) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            (
                *("pulls_ok", "pulls_failed", "bytes", "inflight"),
                *("retired", "worlds_ended", "worlds_silent"),
                *("landed_slot", "landed_directory"),
            ),
            0,
        )
        self._made = _make(registry)

    def began(self) -> None:
        """A pull has begun."""
        with self._lock:
            self._counts["inflight"] += 1
        if self._made is not None:
            self._made["inflight"].inc()

    def ended(
        self,
        seconds: float,
        error: BaseException | None,
        *,
        run: str = "",
        step: int = 0,
        size: int = 0,
        path: str = "",
        phases: Mapping[str, float] | None = None,
    ) -> None:
        """A pull has ended, after *seconds*, by *error* or with *size* bytes of a run's step.

        path: of most bytes. phases: seconds of its parts by name, of the slowest worker.
        """
        with self._lock:
            self._counts["inflight"] -= 1
            self._counts["pulls_ok" if error is None else "pulls_failed"] += 1
            self._counts["bytes"] += size
        if self._made is None:
            return
        self._made["inflight"].dec()
        self._made["pulls"].labels(result=_result(error)).inc()
        self._made["seconds"].observe(seconds)
        if error is None:
            if size:
                self._made["bytes"].labels(path=path).inc(size)
            for phase, took in (phases or {}).items():
                self._made["phases"].labels(phase=phase).observe(took)
            self._made["step"].labels(run=run).set(step)

    def landed(self, landing: str) -> None:
        """A pull has ended in a "slot", or in a "directory"."""
        with self._lock:
            self._counts[f"landed_{landing}"] += 1
        if self._made is not None:
            self._made["landed"].labels(landing=landing).inc()

    def retired(self, reason: str) -> None:
        """An adapter leaves."""
        with self._lock:
            self._counts["retired"] += 1
        if self._made is not None:
            self._made["retired"].labels(reason=reason).inc()

    def world_ended(self) -> None:
        """A launch whose adapters were here has a successor, or the engine another trainer."""
        with self._lock:
            self._counts["worlds_ended"] += 1
        if self._made is not None:
            self._made["ended"].inc()

    def silent(self, worlds: int) -> None:
        """So many launches whose adapters are served do not answer now."""
        with self._lock:
            self._counts["worlds_silent"] = worlds
        if self._made is not None:
            self._made["silent"].set(worlds)

    def snapshot(self) -> dict[str, int]:
        """The numbers now."""
        with self._lock:
            return dict(self._counts)


def _result(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, FaninError):
        return error.name
    return "FANIN_ERR_INTERNAL"


def _make(registry: Any) -> dict[str, Any] | None:
    try:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    except ImportError:
        return None
    where = {"registry": REGISTRY if registry is None else registry}
    return {
        "pulls": Counter(
            "fanin_pulls",
            "Pulls of adapters: ok, or the error that ended them.",
            ["result"],
            **where,
        ),
        "seconds": Histogram(
            "fanin_pull_seconds",
            "Seconds from the request for an adapter until it is here, or the error.",
            buckets=_BUCKETS,
            **where,
        ),
        "phases": Histogram(
            "fanin_pull_phase_seconds",
            "Seconds of a pull's parts: connect, catalog, plan, wait, begin, read, end, write.",
            ["phase"],
            buckets=_PHASE_BUCKETS,
            **where,
        ),
        "bytes": Counter(
            "fanin_pull_bytes", "Bytes of tensors pulled, by the path of most.", ["path"], **where
        ),
        "step": Gauge(
            "fanin_adapter_step",
            "Step of the run's adapter that was pulled last.",
            ["run"],
            multiprocess_mode="mostrecent",
            **where,
        ),
        "landed": Counter(
            "fanin_landings",
            "Adapters that were pulled into a slot's layout, or into a directory.",
            ["landing"],
            **where,
        ),
        "retired": Counter(
            "fanin_adapters_retired",
            "Adapters that left: newer, launch, run, replaced, unloaded, unloadable.",
            ["reason"],
            **where,
        ),
        "ended": Counter(
            "fanin_worlds_ended",
            "Launches of trainers whose adapters were here and went: another one took their place.",
            **where,
        ),
        "silent": Gauge(
            "fanin_worlds_silent",
            "Launches of trainers that do not answer now and whose adapters are served.",
            multiprocess_mode="livesum",
            **where,
        ),
        "inflight": Gauge(
            "fanin_pull_inflight",
            "Pulls that are running or waiting for their step.",
            multiprocess_mode="livesum",
            **where,
        ),
    }


_shared: Metrics | None = None
_deltas: dict[str, Any] | None = None
_shared_lock = threading.Lock()


def count_delta(because: str, saved: int, registry: Any = None) -> None:
    """Counts a worker's pull of a whole model that asked for deltas.

    because: why it read the whole, "" if it did not. saved: bytes of the model that it has not
    read.
    """
    global _deltas
    with _shared_lock:
        if _deltas is None:
            _deltas = _make_deltas(registry)
    if _deltas:
        _deltas["pulls"].labels(whole_because=because).inc()
        _deltas["saved"].inc(saved)


def _make_deltas(registry: Any) -> dict[str, Any]:
    try:
        from prometheus_client import REGISTRY, Counter
    except ImportError:
        return {}
    where = {"registry": REGISTRY if registry is None else registry}
    return {
        "pulls": Counter(
            "fanin_delta_pulls",
            "Pulls of a worker that asked for what has changed; else why they read the whole. As "
            "it is a worker's, vLLM shows it if PROMETHEUS_MULTIPROC_DIR is set.",
            ["whole_because"],
            **where,
        ),
        "saved": Counter(
            "fanin_delta_saved_bytes",
            "Bytes of whole models that such pulls have not read, likewise.",
            **where,
        ),
    }


def metrics() -> Metrics:
    """This process' metrics, made at the first call: a registry takes each name once."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Metrics()
        return _shared
