# SPDX-License-Identifier: Apache-2.0
"""Whole models for code that hands tensors to a transport, bucket by bucket.

Training servers that were written for a process group gather every tensor to the rank that sends,
and give it to a transport object: initialize, transfer_bucket for each bucket, destroy. This is
such an object. It keeps what it is given, publishes it as ``full:<run>``, and has the engines pull
it.

What that costs, and ``fanin.torch.WeightServer`` does not: the gather, and a copy of the whole
model in the memory of one rank (buckets are written again as soon as transfer_bucket returns). Use
it where the calling code cannot be changed, or first.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable
from typing import Any

from fanin._http import checked_key
from fanin._options import names_of
from fanin._tensors import Shard, shard_of
from fanin.errors import FaninError, NotFoundError, RequestError, StateError
from fanin.info import join_address
from fanin.names import check_run
from fanin.server import Server

from .endpoints import SyncError, SyncResult
from .registry import Registry

_SETTINGS = {"run", "advertise", "keep_on", "timeout", "kind", "api_key", "pause_mode", "prefetch"}
# What the transport gives its fanin.Server itself.
_OWN = ("world_id", "rank", "world_size", "name", "open")


class _Publication:
    """What outlives the transport objects, of which callers make a new one for every sync."""

    def __init__(self, run: str, settings: dict[str, Any]) -> None:
        self.publication = "full:" + run
        self.settings = settings
        reach = settings.get("advertise") or settings.get("bind") or "127.0.0.1"
        self.server = Server(
            world_id=secrets.token_bytes(16),
            rank=0,
            world_size=1,
            name="transport",
            open=settings.get("allow") is not None,
            **{name: settings[name] for name in settings.keys() & names_of(Server)},
        )
        self.registry = Registry(
            [join_address(reach, self.server.port)],
            run=run,
            timeout=settings.get("timeout", 300.0),
            api_key=settings.get("api_key"),
            prefetch=settings.get("prefetch", "auto"),
            secret_file=settings.get("secret_file"),
        )
        self.keep_on = settings.get("keep_on", "cpu")
        self.kept: dict[str, Any] = {}
        self.step = 0
        self.user: object | None = None

    def take(self, name: str, value: Any, new: list[Shard]) -> Any:
        """Begins to copy the tensor. If it is not published yet, *new* gets the shard to publish.

        Returns the copy.
        """
        kept = self.kept.get(name)
        if kept is None:
            copy = self._copy(value)
            # In this order: what is refused is in neither, and what is kept can be dropped.
            new.append(shard_of(name, copy))
            self.kept[name] = copy
            return copy
        if tuple(kept.shape) != tuple(value.shape) or kept.dtype != value.dtype:
            raise RequestError.make(
                f"{name} was {kept.dtype} {tuple(kept.shape)}, and is {value.dtype}"
                f" {tuple(value.shape)} now",
                "close_all() begins anew",
                key=name,
            )
        if hasattr(kept, "copy_"):
            kept.copy_(value.detach())
        else:
            kept[...] = value
        return kept

    def _copy(self, value: Any) -> Any:
        if hasattr(value, "detach"):
            return value.detach().to(self.keep_on, copy=True).contiguous()
        return value.copy(order="C")


def _finish(copies: Iterable[Any]) -> None:
    """Waits for what this thread's CUDA streams still copy: a commit, which may be made by another
    thread, takes all for written, and callers write their buckets again."""
    devices = {getattr(copy, "device", None) for copy in copies}
    for device in devices:
        if getattr(device, "type", "cpu") == "cuda":
            import torch

            torch.cuda.current_stream(device).synchronize()


_lock = threading.Lock()
_published: dict[str, _Publication] = {}


class TransportBackend:
    """Publishes the weights that it is given, and has the engines pull them. For the sending rank,
    rank 0.

    One thread uses an object, and a run has one object at a time. The publication, the engines'
    mapping and their connections stay from one object to the next. :meth:`close_all` ends them.

    Args:
        config: any object with ``endpoints`` (each with ``host`` and ``port``), ``training_rank``
            and ``backend_config``. The backend needs no rendezvous address, group name or bucket
            size.
        settings: the same fields as ``backend_config``, and they win.

    The fields of ``backend_config`` are:

    - ``run``: the run to publish, "0".
    - ``bind``: numeric address to listen on, "127.0.0.1".
    - ``advertise``: the address that engines connect to; default: ``bind``.
    - ``base_port``: 0: any port.
    - ``keep_on``: the device of the copies, "cpu".
    - ``timeout``, ``kind``, ``api_key``, ``pause_mode``, ``prefetch``: as Registry takes them.
    - what else :class:`fanin.Server` takes: ``allow``, ``trusted_network``, ``secret_file``,
      ``tls_cert``, ``tls_key``, ``tls_ca``, ``insecure`` and so on.

    Raises:
        RequestError: a field is unknown, or ``api_key`` is a key that no header can have.
    """

    def __init__(self, config: Any, **settings: Any) -> None:
        given = {**(getattr(config, "backend_config", None) or {}), **settings}
        known = _SETTINGS | names_of(Server, *_OWN)
        unknown = sorted(set(given) - known)
        if unknown:
            raise RequestError.make(
                f"backend_config has an unknown field {unknown[0]!r}",
                "the fields are " + ", ".join(sorted(known)),
                key=unknown[0],
            )
        self.config = config
        self.endpoint_results: list[dict[str, Any]] = []
        self._settings = {**given, "api_key": checked_key(given.get("api_key"))}
        self._run = check_run(given.get("run", "0"))
        self._publication: _Publication | None = None
        self._new: list[Shard] = []
        self._seen: set[str] = set()
        self._failed = ""  # why a bucket did not come whole
        self._version: str | None = None

    @property
    def sender_ranks(self) -> frozenset[int]:
        """The ranks that call transfer_bucket: rank 0."""
        return frozenset({0})

    @property
    def supports_direct_ep_transfer(self) -> bool:
        """False: experts are gathered to rank 0. ``WeightServer`` publishes them where they are."""
        return False

    @property
    def supports_direct_pp_transfer(self) -> bool:
        """False, as for experts."""
        return False

    def initialize(self) -> bool:
        """Listens, and checks that every endpoint is well. Blocks some seconds at most.

        Returns:
            True.

        Raises:
            StateError: an object of this run is in use.
            FaninError: what :meth:`Registry.check` and :class:`fanin.Server` raise, naming the
                endpoint.
        """
        endpoints = list(getattr(self.config, "endpoints", []))
        if not endpoints:
            raise RequestError.make("the transport has no endpoint", "add an engine first")
        if getattr(self.config, "training_rank", 0) != 0:
            raise RequestError.make("only rank 0 sends", "ask sender_ranks")
        with _lock:
            held = _published.get(self._run)
            if held is not None and held.user is not None:
                raise StateError.make(
                    f"full:{self._run} is being sent by another transport", "destroy it first"
                )
            if held is not None and held.settings != self._settings:
                raise StateError.make(
                    f"full:{self._run} is published with other settings", "close_all() first"
                )
            if held is None:
                held = _published[self._run] = _Publication(self._run, self._settings)
            held.user = self
        self._publication = held
        try:
            self._register(held, endpoints)
            held.server.begin_update(held.publication)
        except BaseException:
            self._leave()
            raise
        return True

    def _register(self, held: _Publication, endpoints: Iterable[Any]) -> None:
        wanted = []
        for endpoint in endpoints:
            url = f"http://{join_address(endpoint.host, endpoint.port)}"
            kind = self._settings.get("kind", "auto")
            wanted.append(held.registry.add(url, kind=kind).url)
        for known in held.registry.endpoints():
            if known.url not in wanted:
                held.registry.remove(known.url)
        for url in wanted:
            held.registry.check(url)

    def transfer_bucket(
        self,
        bucket: Iterable[tuple[str, Any]],
        *,
        src_rank: int = 0,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Copies the tensors; their memory may be written again when it returns.

        Blocks as long as the copies take. After an error, also one of *bucket*'s own, nothing can
        complete this sync: :meth:`destroy` publishes nothing.

        Args:
            bucket: (checkpoint name, tensor) pairs, contiguous or not.
            flush_cache: is not looked at, for engines drop their caches in any case.
            weight_version: of the whole sync; told with any bucket.

        Raises:
            StateError: :meth:`initialize` was not called.
            RequestError: a name came already, or its shape or dtype is another than in the sync
                before.
        """
        held = self._held()
        try:
            self._take(held, bucket, src_rank)
        except BaseException as error:
            # Callers destroy in a finally, and nobody knows which names were still to come.
            self._failed = self._failed or f"{type(error).__name__}: {error}"
            raise
        self._version = weight_version or self._version

    def _take(self, held: _Publication, bucket: Iterable[tuple[str, Any]], src_rank: int) -> None:
        if src_rank != 0:
            raise RequestError.make(f"rank {src_rank} sends", "only rank 0 may", rank=src_rank)
        copies = []
        for name, value in bucket:
            if name in self._seen:
                raise RequestError.make(f"{name} was sent twice", "send it once", key=name)
            copies.append(held.take(name, value, self._new))
            self._seen.add(name)
        _finish(copies)

    def flush_pending_transfers(self) -> None:
        """Nothing is pending: transfer_bucket returns when its copies are made."""

    def destroy(self, *, complete_receiver: bool = True) -> None:
        """Publishes what was sent and syncs the endpoints.

        Blocks until the endpoints have it: at most the timeout. ``endpoint_results`` says what
        became of each. Safe if :meth:`initialize` was not called, and twice. After an error of the
        trainer's side nothing is published, and the engines are not asked.

        Args:
            complete_receiver: False: drops what was sent, and engines stay as they are.

        Raises:
            SyncError: naming each endpoint that failed.
            RequestError: naming a tensor that the sync before had and this one has not, or why a
                bucket failed.
            FaninError: what put and commit of :class:`fanin.Server` raise.
        """
        if self._publication is None:
            return
        held = self._publication
        try:
            if complete_receiver and self._failed:
                self._drop(held)
                raise RequestError.make(
                    f"a bucket failed, so nothing was published and no engine asked: {self._failed}"
                )
            if not (complete_receiver and self._seen):
                self._drop(held)
                return
            missing = sorted(set(held.kept) - self._seen)
            if missing:
                self._drop(held)
                raise RequestError.make(
                    f"{missing[0]} was not sent, of {len(missing)} that the sync before had",
                    "send every tensor; close_all() begins anew",
                    key=missing[0],
                )
            self._complete(held)
        finally:
            self._leave()

    def _complete(self, held: _Publication) -> None:
        try:
            if self._new:
                held.server.put(held.publication, self._new)
                self._new = []
            # Before the commit: one that Ctrl-C ends has taken effect, and its number is used.
            held.step += 1
            held.server.commit(held.publication, held.step)
        except BaseException:
            with contextlib.suppress(FaninError):  # what is told is why it failed
                self._take_back(held)
                self._drop(held)
            raise
        try:
            result = held.registry.sync(
                held.step,
                version=self._version,
                pause_mode=self._settings.get("pause_mode", "retract"),
            )
        except SyncError as error:
            self._tell(error.result)
            raise
        self._tell(result)

    def _tell(self, result: SyncResult) -> None:
        self.endpoint_results = []
        for entry in result.results.values():
            host, _, port = entry.endpoint.url.partition("://")[2].rpartition(":")
            body = {"host": host.strip("[]"), "port": int(port), **entry.to_json()}
            self.endpoint_results.append(body)

    def _take_back(self, held: _Publication) -> None:
        """A put that Ctrl-C ends has taken effect, too."""
        for shard in self._new:
            with contextlib.suppress(NotFoundError):
                held.server.remove(held.publication, shard.name)

    def _drop(self, held: _Publication) -> None:
        """What is not published yet was copied in part: it is sent anew."""
        for shard in self._new:
            held.kept.pop(shard.name, None)
        self._new = []
        held.server.abort_update(held.publication)

    def _held(self) -> _Publication:
        if self._publication is None:
            raise StateError.make("the transport is not initialized", "call initialize() first")
        return self._publication

    def _leave(self) -> None:
        with _lock:
            if self._publication is not None and self._publication.user is self:
                self._publication.user = None
        self._publication = None
        self._seen = set()
        self._failed = ""
        self._version = None

    @staticmethod
    def close_all() -> None:
        """Ends all publications of this process, and gives their memory back. Blocks a second.

        Raises:
            StateError: one is in use.
        """
        with _lock:
            for run, held in list(_published.items()):
                if held.user is not None:
                    raise StateError.make(f"full:{run} is being sent", "destroy the transport")
                del _published[run]
                held.server.close()
