# SPDX-License-Identifier: Apache-2.0
"""The client of :class:`fanin.parameter_server.ParameterServer`, with NIXL-style calls.

What differs from clients of that style: tensors are never half-written ones; ``batch_get`` gives
tensors of one step of each publication, in one pull, and raises instead of leaving tensors out
when the transfer fails; nothing that is received is unpickled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fanin._dtypes import NUMPY, dtype_name
from fanin._options import handed_on
from fanin._tensors import Shard, shard_of
from fanin.client import Client
from fanin.errors import (
    ConnectionFailedError,
    FaninError,
    NotFoundError,
    PullTimeoutError,
    RequestError,
)
from fanin.info import join_address
from fanin.parameter_server import TensorInfo, join_key, split_key
from fanin.server import Stream

__all__ = ["ParameterClient", "TensorInfo"]

_T = TypeVar("_T")

_log = logging.getLogger("fanin.parameter_client")

_MISMATCH = -405


# What NumPy lacks comes as its bits.
def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


class ParameterClient:
    """Fetches tensors by key from one parameter server.

    ``catalog`` maps keys to :class:`TensorInfo` as of the last refresh. ``steps`` maps publications
    to the step that was fetched last. One operation runs at a time; others wait.

    Args:
        name: of this client, for logs.
        server_name, server_ip, server_port: the server's.
        device: of the tensors that are made, such as "cpu" or "cuda:0".
        timeout: seconds for each operation, and for connecting. The server may still be starting
            meanwhile.
        tcp_only: plain TCP only.
        more: what else :class:`fanin.Client` takes, such as secret_file, tls_cert, tls_key and
            tls_ca.

    Raises:
        PullTimeoutError: a TimeoutError; the server does not answer in time.
        PeerError: the server has another name, or is one rank of a larger world. For a larger world
            use fanin.Client with all addresses.
    """

    def __init__(
        self,
        name: str,
        server_name: str,
        server_ip: str,
        server_port: int,
        device: Any = "cpu",
        timeout: float = 30.0,
        tcp_only: bool = False,
        **more: Any,
    ) -> None:
        own = ("server_name", "path", "use_unix", "use_ucx")
        more = handed_on("ParameterClient", Client, more, *own)
        torch = _torch()
        if torch is None and str(device) != "cpu":
            raise RequestError.make(f"device {device} needs PyTorch", "install torch")
        self.name = name
        self.server_name = server_name
        self.server_ip = server_ip
        self.server_port = server_port
        self.device = torch.device(device) if torch is not None else str(device)
        self.timeout = timeout
        self.catalog: dict[str, TensorInfo] = {}
        self.steps: dict[str, int] = {}
        self._dtypes: dict[str, str] = {}
        self._withheld: set[str] = set()
        self._lock = threading.Lock()
        self._client = Client(
            server_name=server_name,
            path="stream" if tcp_only else "auto",
            use_unix=not tcp_only,
            use_ucx=not tcp_only,
            **more,
        )
        try:
            self._connect(join_address(server_ip, server_port))
            self._refresh(time.monotonic() + timeout)
        except BaseException:
            self._client.close()
            raise
        _log.info("%s: connected to %s: %d keys", name, server_name, len(self.catalog))

    def _connect(self, address: str) -> None:
        deadline = time.monotonic() + self.timeout
        pause = 0.01
        while True:
            left = deadline - time.monotonic()
            try:
                self._client.connect([address], timeout=max(left, 0.001))
                return
            except (ConnectionFailedError, PullTimeoutError) as error:
                if not error.retryable:
                    raise
                if left <= pause:
                    raise PullTimeoutError.make(
                        f"no parameter server {self.server_name} at {address} within"
                        f" {self.timeout:g} s: {error.message}",
                        "check that it runs, and that it may be reached (bind and allow)",
                        address=address,
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    # ---------------------------------------------------------------- catalog

    def refresh_catalog(self) -> None:
        """Asks the server which tensors there are now; waits for an update that is under way.

        Blocks at most the client's timeout. Raises PullTimeoutError, ConnectionFailedError.
        """
        self._in_turn(None, self._refresh)

    def _in_turn(self, timeout: float | None, operation: Callable[[float], _T]) -> _T:
        """Does *operation*, which is given its deadline, when those of other threads have ended."""
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        limit = min(max(0.0, limit), threading.TIMEOUT_MAX)
        taken: list[bool] = []
        try:
            # In one step of Python's: no interrupt finds the lock taken, and not yet noted.
            taken.extend(map(self._lock.acquire, (True,), (limit,)))
            if not taken[0]:
                raise PullTimeoutError.make(
                    "the operation's time is over while another thread's is under way",
                    "give a longer timeout, or each thread a client of its own",
                )
            return operation(deadline)
        finally:
            if True in taken:
                self._lock.release()

    def _refresh(self, deadline: float) -> None:
        catalog: dict[str, TensorInfo] = {}
        dtypes: dict[str, str] = {}
        withheld: set[str] = set()
        for info in self._client.publications(timeout=_left(deadline)):
            if info.state == "unpublished":
                if info.catalog_version > 0:
                    withheld.add(info.name)
                continue
            try:
                entries = self._client.catalog(info.name, timeout=_left(deadline))
            except NotFoundError:
                continue  # removed meanwhile
            for entry in entries:
                key = join_key(info.name, entry.name)
                dtypes[key] = entry.dtype
                name = dtype_name(entry.dtype)
                catalog[key] = TensorInfo(entry.bytes, entry.shape, name, 0)
        self.catalog, self._dtypes, self._withheld = catalog, dtypes, withheld

    def _await(self, keys: Iterable[str], deadline: float) -> None:
        """Waits for publications that were there and are half-written now."""
        missing = {split_key(key)[0] for key in keys if key not in self.catalog}
        waited = missing & self._withheld
        for publication in sorted(waited):
            try:
                self._client.catalog(publication, timeout=_left(deadline))
            except NotFoundError:
                continue
        if waited:
            self._refresh(deadline)

    def keys(self) -> list[str]:
        """The catalog's keys. Does not block."""
        return list(self.catalog)

    def get_info(self, key: str) -> TensorInfo | None:
        """What the catalog says of *key*, None if it is not there. Does not block.

        Where the server's memory is cannot be seen from here: device_id is 0.
        """
        return self.catalog.get(key)

    # --------------------------------------------------------------- fetching

    def get(self, key: str, out: Any = None, timeout: float | None = None) -> Any:
        """Fetches one tensor; None if there is none of that key.

        Blocks at most *timeout*.

        Args:
            out: the destination, of the right shape and dtype. None: a new PyTorch tensor on the
                client's device. Without PyTorch: a NumPy array. For dtypes that NumPy lacks it has
                unsigned integers with the same bits.
            timeout: seconds; None: the client's.

        Raises:
            ValueError: *out* does not fit.
            FaninError: as fanin.Client.pull_into.
        """
        return self._in_turn(timeout, lambda deadline: self._get(key, out, deadline))

    def _get(self, key: str, out: Any, deadline: float) -> Any:
        self._await([key], deadline)
        if key not in self.catalog:
            _log.warning("%s: no key %r in the catalog", self.name, key)
            return None
        if out is not None:
            self._check(key, out)
        return self._fetch([key], {} if out is None else {key: out}, deadline).get(key)

    def batch_get(self, keys: Iterable[str], timeout: float | None = None) -> dict[str, Any]:
        """Fetches several tensors, as :meth:`get`; keys that are not there are left out.

        Tensors of one publication (``lora:<run>``) are all of one step. Blocks at most *timeout*
        seconds (None: the client's). Raises what fanin.Client.pull_into raises.
        """
        asked = list(dict.fromkeys(keys))
        return self._in_turn(timeout, lambda deadline: self._batch_get(asked, deadline))

    def _batch_get(self, asked: list[str], deadline: float) -> dict[str, Any]:
        self._await(asked, deadline)
        wanted = [key for key in asked if key in self.catalog]
        return self._fetch(wanted, {}, deadline)

    def _fetch(self, keys: list[str], out: dict[str, Any], deadline: float) -> dict[str, Any]:
        groups: dict[str, list[str]] = {}
        for key in keys:
            groups.setdefault(split_key(key)[0], []).append(key)
        found: dict[str, Any] = {}
        for publication, members in groups.items():
            found.update(self._fetch_group(publication, members, out, deadline))
        return {key: found[key] for key in keys if key in found}

    def _fetch_group(
        self, publication: str, keys: list[str], out: dict[str, Any], deadline: float
    ) -> dict[str, Any]:
        while True:
            tensors = {key: out[key] if key in out else self._make(key) for key in keys}
            shards = [self._shard(key, tensor) for key, tensor in tensors.items()]
            try:
                result = self._client.pull_into(
                    publication, shards, timeout=_left(deadline), stream=self._stream(tensors)
                )
            except FaninError as error:
                if not isinstance(error, NotFoundError) and error.code != _MISMATCH:
                    raise
                # Removed, or replaced by one of another form, since the catalog was asked for.
                before = {key: self.catalog[key] for key in keys}
                self._refresh(deadline)
                keys = [key for key in keys if key in self.catalog]
                if not keys:
                    return {}
                for key in keys:
                    if key in out:
                        self._check(key, out[key])
                if {key: self.catalog[key] for key in keys} == before:
                    raise
                continue
            self.steps[publication] = result.step
            return tensors

    def _make(self, key: str) -> Any:
        info = self.catalog[key]
        torch = _torch()
        if torch is not None:
            dtype = getattr(torch, info.dtype, None)
            if dtype is None:
                raise RequestError.make(f"PyTorch has no dtype {info.dtype}", key=key)
            return torch.empty(info.shape, dtype=dtype, device=self.device)
        import numpy

        kind = NUMPY.get(self._dtypes[key])
        if kind is None:
            raise RequestError.make(f"NumPy cannot hold {self._dtypes[key]}", key=key)
        return numpy.empty(info.shape, dtype=kind)

    def _shard(self, key: str, tensor: Any) -> Shard:
        return shard_of(split_key(key)[1], tensor, dtype=self._dtypes[key], writable=True)

    def _check(self, key: str, out: Any) -> None:
        info = self.catalog[key]
        if tuple(out.shape) != tuple(info.shape):
            raise ValueError(f"out has shape {tuple(out.shape)}, and {key!r} has {info.shape}")
        have = str(out.dtype).removeprefix("torch.")
        bits = NUMPY.get(self._dtypes[key], "")
        raw = {"u1": "uint8", "u2": "uint16"}.get(bits)
        if have != info.dtype and not (hasattr(out, "__array_interface__") and have == raw):
            raise ValueError(f"out has dtype {have}, and {key!r} has {info.dtype}")

    def _stream(self, tensors: dict[str, Any]) -> Stream | None:
        """The stream whose work on the destinations comes before the fetch."""
        devices = {
            tensor.device.index
            for tensor in tensors.values()
            if getattr(getattr(tensor, "device", None), "type", "cpu") == "cuda"
        }
        if not devices:
            return None
        torch = _torch()
        first, *others = sorted(devices)
        for device in others:
            torch.cuda.current_stream(device).synchronize()
        return Stream(torch.cuda.current_stream(first).cuda_stream, first)

    # -------------------------------------------------------------------- end

    def disconnect(self) -> None:
        """Closes the connection; a fetch in another thread is cancelled. Raises nothing."""
        try:
            self._client.close()
        except (FaninError, OSError) as error:
            _log.warning("%s: while disconnecting: %s", self.name, error)

    def __enter__(self) -> ParameterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise PullTimeoutError.make("the operation's time is over", "give a longer timeout")
    return left
