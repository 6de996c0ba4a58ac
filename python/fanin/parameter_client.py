# SPDX-License-Identifier: Apache-2.0
"""The names of NIXL-style parameter clients, over :class:`fanin.Client`.

Tensors are never half-written ones. ``batch_get`` pulls tensors of one step, and raises when the
transfer fails.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fanin._dtypes import dtype_name
from fanin._options import handed_on
from fanin.client import Client
from fanin.errors import ConnectionFailedError, NotFoundError, PeerError, PullTimeoutError
from fanin.info import join_address
from fanin.parameter_server import ALL, TensorInfo

__all__ = ["ParameterClient", "TensorInfo"]


class ParameterClient:
    """Fetches tensors by key from one parameter server.

    ``catalog`` maps keys to :class:`TensorInfo` as of the last refresh. ``step`` is the step that
    was fetched last. One operation runs at a time; others wait.

    Args:
        name: of this client.
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
        own: dict[str, Any] = {"server_name": server_name, "path": "stream" if tcp_only else "auto"}
        own |= {"use_unix": not tcp_only, "use_ucx": not tcp_only}
        more = handed_on("ParameterClient", Client, more, *own)
        self.name, self.server_name, self.device, self.timeout = name, server_name, device, timeout
        self.catalog: dict[str, TensorInfo] = {}
        self.step = 0
        self._lock = threading.Lock()
        self._client = Client(**own, **more)
        try:
            self._connect(join_address(server_ip, server_port))
            self.refresh_catalog()
        except BaseException:
            self._client.close()
            raise

    def _connect(self, address: str) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return self._client.connect([address], timeout=max(left, 0.001))
            except (ConnectionFailedError, PullTimeoutError) as error:
                if not error.retryable:
                    raise
                if left <= 0.1:
                    raise PullTimeoutError.make(
                        f"no parameter server {self.server_name} at {address} within"
                        f" {self.timeout:g} s: {error.message}",
                        "check that it runs, and that it may be reached (bind and allow)",
                        address=address,
                    ) from error
            time.sleep(0.1)

    @contextlib.contextmanager
    def _turn(self, timeout: float | None) -> Iterator[Callable[[], float]]:
        """The operation's turn, with the seconds until its deadline."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)

        def left() -> float:
            return min(max(deadline - time.monotonic(), 0.001), threading.TIMEOUT_MAX)

        if not self._lock.acquire(timeout=left()):
            raise PullTimeoutError.make(
                "the operation's time is over while another thread's is under way",
                "give a longer timeout, or each thread a client of its own",
            )
        try:
            yield left
        finally:
            self._lock.release()

    def refresh_catalog(self) -> None:
        """Asks the server which tensors there are now; waits for an update that is under way.

        Blocks at most the client's timeout. Raises PullTimeoutError, ConnectionFailedError.
        """
        with self._turn(None) as left:
            self._refresh(left())

    def _refresh(self, timeout: float) -> None:
        self.catalog = {
            one.name: TensorInfo(one.bytes, one.shape, dtype_name(one.dtype), 0)
            for one in self._client.catalog(ALL, timeout=timeout, owners=False)
        }

    def keys(self) -> list[str]:
        """The catalog's keys. Does not block."""
        return list(self.catalog)

    def get_info(self, key: str) -> TensorInfo | None:
        """What the catalog says of *key*, None if it is not there. Does not block."""
        return self.catalog.get(key)

    def get(self, key: str, out: Any = None, timeout: float | None = None) -> Any:
        """Fetches one tensor; None if there is none of that key.

        Args:
            out: the destination, a tensor or array of the right shape and dtype. None: a new
                PyTorch tensor on the client's device; without PyTorch a NumPy array.
            timeout: seconds that this blocks at most; None: the client's.

        Raises:
            FaninError: as fanin.Client.pull_into; PeerError: *out* does not fit.
        """
        return self._fetch([key], {} if out is None else {key: out}, timeout).get(key)

    def batch_get(self, keys: Iterable[str], timeout: float | None = None) -> dict[str, Any]:
        """Fetches several tensors, as :meth:`get`; keys that are not there are left out.

        All are of one step.
        """
        return self._fetch(list(dict.fromkeys(keys)), {}, timeout)

    def _fetch(self, keys: list[str], out: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        with self._turn(timeout) as left:
            if any(key not in self.catalog for key in keys):
                self._refresh(left())
            while there := {key: self.catalog[key] for key in keys if key in self.catalog}:
                tensors = {key: out[key] if key in out else self._make(key) for key in there}
                try:
                    self.step = self._client.pull_into(ALL, tensors, timeout=left()).step
                    return tensors
                except (NotFoundError, PeerError):
                    # Removed, or replaced by one of another form, since the catalog was asked for.
                    self._refresh(left())
                    if there == {key: self.catalog.get(key) for key in there}:
                        raise
            return {}

    def _make(self, key: str) -> Any:
        info = self.catalog[key]
        try:
            import torch
        except ImportError:
            if str(self.device) != "cpu":
                raise
            import numpy

            return numpy.empty(info.shape, info.dtype)
        return torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=self.device)

    def disconnect(self) -> None:
        """Closes the connection; a fetch in another thread is cancelled."""
        self._client.close()

    def __enter__(self) -> ParameterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()
