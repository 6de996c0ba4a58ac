# SPDX-License-Identifier: Apache-2.0
"""The names of NIXL-style parameter servers, over :class:`fanin.Server`.

Code that was written for such a server imports :class:`ParameterServer` from here and
:class:`fanin.parameter_client.ParameterClient`. Tensors are served by reference, of any strides.

Readers get whole tensors of one step. Each ``put``, ``update`` and ``remove`` publishes a step. A
trainer that writes tensors in place adds one line, which publishes the next step at its end::

    with server.updating():
        optimizer.step()

Only this host can connect, unless ``bind`` and ``allow`` (or FANIN_BIND and FANIN_ALLOW) say more.

Each server is a world of its own with one rank. Shards of several servers may be of different
steps. fanin.torch.AdapterServer rules that out, and notices writes outside of ``updating()``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fanin._options import VARIABLES, Configured, handed_on, options_of
from fanin._puller import current_stream
from fanin._tensors import shard_of
from fanin.config import trainer_config
from fanin.errors import FaninError
from fanin.info import is_loopback
from fanin.server import Server, Stream

__all__ = ["ParameterServer", "TensorInfo"]

ALL = "lora:-"
"""The publication that has all keys."""


@dataclass
class TensorInfo:
    """What is known of a tensor. dtype: PyTorch's name, such as "bfloat16"."""

    size: int  # bytes
    shape: tuple[int, ...]
    dtype: str
    device_id: int  # of CUDA, 0 also for the host


class ParameterServer:
    """Serves tensors by key. Any thread may call any method.

    Args:
        name: of the server; clients must give the same.
        port: to listen on, 0: any, see ``port``.
        tcp_only: no RDMA.
        snapshot: serve copies, made at each step, for twice the memory.
        more: what else :class:`fanin.Server` takes, such as bind, allow, lease and secret_file. The
            rest is as the trainer's variables say.

    Raises:
        RequestError: the port is in use, or bind needs allow.
        HostError: libfanin is missing.
        ConfigError: a variable is malformed.
        TypeError: an argument that neither this class nor fanin.Server takes.
    """

    def __init__(
        self,
        name: str,
        port: int = 5555,
        tcp_only: bool = False,
        *,
        snapshot: bool | None = None,
        **more: Any,
    ) -> None:
        own: dict[str, Any] = {"world_id": os.urandom(16), "rank": 0, "world_size": 1, "name": name}
        own |= {"base_port": port, "use_ucx": not tcp_only}
        given = handed_on("ParameterServer", Server, more, *own, "open")
        # What the server itself finds in the environment is not for this to judge.
        environ = {**os.environ, "FANIN_CAST": "", **dict.fromkeys(VARIABLES.values(), "")}
        told = {name: given.get(name) for name in options_of(Configured)}
        config = trainer_config(environ=environ, snapshot=snapshot, **told)
        given |= {name: getattr(config, name) for name in told}
        given["bind"] = config.bind or "127.0.0.1"
        self._server = Server(**own, **given, open=not is_loopback(given["bind"]))
        self.name, self.port = name, self._server.port
        self.step = -1  # the last one
        self._snapshot = config.snapshot
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._tensors: dict[str, Any] = {}
        self._devices: set[int] = set()  # CUDA devices that have ever had some
        self._updating = False
        self._torn = False  # half-written: in updating(), or after its exception
        self._stream: Stream | None = None  # whose work the last commit waits for
        with self._changing():
            pass  # step 0 has no tensors

    def put(self, key: str, tensor: Any) -> None:
        """Registers *tensor*, a PyTorch tensor or NumPy array, and publishes it.

        Put many tensors inside one :meth:`updating`. Blocks at most the lease. Raises ValueError if
        the key is there already, RequestError if the memory cannot be served.
        """
        with self._changing():
            if key in self._tensors:
                raise ValueError(f"key {key!r} is there already: update() replaces a tensor")
            self._register({key: tensor})

    def update(self, key: str, tensor: Any) -> None:
        """Puts another *tensor* in the place of the key's, and publishes it.

        Blocks at most the lease. Raises KeyError if the key is not there, RequestError as
        :meth:`put`.
        """
        with self._changing():
            if key not in self._tensors:
                raise KeyError(f"no key {key!r}: put() adds a tensor")
            self._register({key: tensor})

    def _register(self, tensors: dict[str, Any]) -> None:
        shards = [shard_of(key, tensor) for key, tensor in tensors.items()]
        self._server.put(ALL, shards, replace=not tensors.keys().isdisjoint(self._tensors))
        self._devices |= {one.device for one in shards if one.device is not None} - {-1}
        self._tensors |= tensors

    def remove(self, key: str) -> None:
        """Takes the tensor out; when this returns, nobody reads its memory any more.

        Blocks at most the lease. Raises KeyError if the key is not there.
        """
        with self._changing():
            if key not in self._tensors:
                raise KeyError(f"no key {key!r}")
            self._server.remove(ALL, key)
            del self._tensors[key]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            yield
            if not self._torn:
                self._server.begin_update(ALL)
                self._commit()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """In this block registered tensors may be written; its end publishes them as one step.

        A tensor may also get other memory (``p.data = ...``, ``module.to()``).
        Waits for running readers, at most the lease. New readers wait for the block and for the
        work on the current CUDA streams. Other threads' changes wait. If the block raises, readers
        see nothing until a later one has ended well. Raises RuntimeError inside such a block.
        """
        with self._lock:
            if self._updating:
                raise RuntimeError("updating() is called inside updating()")
            self._server.begin_update(ALL)
            self._updating = self._torn = True
            try:
                yield
                self._register(self._tensors)
                self._commit()
            except BaseException:
                with contextlib.suppress(FaninError):
                    self._server.abort_update(ALL)
                raise
            finally:
                self._updating = False

    def _commit(self) -> None:
        stream = current_stream(sorted(self._devices))
        if self._stream is not None and self._stream != stream:
            # The commit that waits for that stream is withdrawn by this one.
            import torch

            torch.cuda.synchronize(self._stream.device)
        self._server.commit(ALL, self.step + 1, snapshot=self._snapshot, stream=stream)
        self.step, self._stream, self._torn = self.step + 1, stream, False

    def get(self, key: str) -> Any:
        """The registered tensor itself, None if there is none. Does not block."""
        return self._tensors.get(key)

    def keys(self) -> list[str]:
        """All keys, in the order in which they were put. Does not block."""
        return list(self._tensors)

    def run(self) -> None:
        """Blocks until :meth:`shutdown`; readers are served without it, too."""
        self._stop.wait()

    def shutdown(self) -> None:
        """Ends the server: readers are cut off and no tensor is held any more.

        Blocks for running reads, at most a second, and for :meth:`updating` in another thread.
        """
        with self._lock:
            self._server.close()
            self._tensors.clear()
        self._stop.set()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
