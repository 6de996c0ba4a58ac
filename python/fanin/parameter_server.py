# SPDX-License-Identifier: Apache-2.0
"""A key-value store of tensors with the calls of NIXL-style parameter servers.

Code that was written for such a server ports by importing :class:`ParameterServer` from here and
:class:`fanin.parameter_client.ParameterClient` beside it. What differs:

* Tensors are still served by reference, but readers never get half-written ones. Each ``put``,
  ``update`` and ``remove`` is a step and publishes itself: at once, or together with others that
  follow within moments, for which readers wait. A trainer that writes registered tensors
  in place says so, which is the one line that porting adds::

      with server.updating():
          optimizer.step()

* ``put`` takes any strides, not only contiguous tensors; and NumPy arrays.
* The server answers from its construction on; :meth:`ParameterServer.run` only waits.
* Only this host can connect, unless ``bind`` and ``allow`` (or FANIN_BIND and FANIN_ALLOW) say
  who may.

Each server is a world of its own with one rank: a client that connects to it gets exactly the
tensors that were put there, for instance one rank's shards, which the caller joins. Shards of
several servers are each whole, but may be of different steps (compare ``ParameterClient.steps``).
fanin.torch.AdapterServer and fanin.Client make one world of all ranks, and pull one step of it.

Keys ``lora:<run>:<name>`` belong to the publication ``lora:<run>``, each of which has its steps;
all other keys to one publication more. One ``batch_get`` gives one step of each publication.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fanin._options import VARIABLES, Configured, handed_on, options_of
from fanin._tensors import Shard, shard_of
from fanin.config import trainer_config
from fanin.errors import FaninError, StateError
from fanin.info import is_loopback
from fanin.server import Server, Stream

__all__ = ["OTHER_KEYS", "ParameterServer", "TensorInfo", "join_key", "split_key"]

_log = logging.getLogger("fanin.parameter_server")

OTHER_KEYS = "lora:-"
"""The publication of keys that are not ``lora:<run>:<name>``."""

_KEY = re.compile(r"(lora:[A-Za-z0-9._-]{1,64}):(.+)", re.ASCII | re.DOTALL)


def split_key(key: str) -> tuple[str, str]:
    """A key's publication and the tensor's name in it. Different keys give different pairs."""
    match = _KEY.fullmatch(key)
    if match is None or match[1] in (OTHER_KEYS, "lora:.", "lora:.."):
        return OTHER_KEYS, key
    return match[1], match[2]


def join_key(publication: str, name: str) -> str:
    """The key of a publication's tensor: the inverse of :func:`split_key`."""
    return name if publication == OTHER_KEYS else f"{publication}:{name}"


@dataclass
class TensorInfo:
    """What is known of a tensor. dtype: PyTorch's name, such as "bfloat16"."""

    size: int  # bytes
    shape: tuple[int, ...]
    dtype: str
    device_id: int  # of CUDA, 0 also for the host


@dataclass
class _Entry:
    tensor: Any
    shard: Shard
    #: How often PyTorch had written the tensor when it was published; None: it does not count.
    version: int | None = None
    #: Where the tensor lies, if PyTorch counts.
    extent: Any = None
    #: Where and how it lay when *shard* was made; None: it is not PyTorch's.
    place: Any = None

    def __post_init__(self) -> None:
        self.published()
        self.place = _place(self.tensor)
        if self.version is not None:
            from fanin.torch._writes import extent_of

            self.extent = extent_of(self.tensor)

    def published(self) -> None:
        self.version = _version(self.tensor)

    @property
    def written(self) -> bool:
        return self.version != _version(self.tensor)

    @property
    def moved(self) -> bool:
        return bool(self.place != _place(self.tensor))


def _version(tensor: Any) -> int | None:
    try:
        return getattr(tensor, "_version", None)
    except RuntimeError:  # a tensor made in inference mode
        return None


def _place(tensor: Any) -> tuple[Any, ...] | None:
    if not hasattr(tensor, "data_ptr"):
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _refuse_offloaded(tensor: Any) -> None:
    if tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
        raise StateError.make("its storage has no bytes")


class ParameterServer:
    """Serves tensors by key.

    Any thread may call any method.

    Args:
        name: of the server; clients must give the same.
        port: to listen on, 0: any, see :attr:`port`.
        tcp_only: no RDMA.
        snapshot: serve copies, made when an update ends. Readers then never delay an update. Costs
            twice the memory.
        more: what else :class:`fanin.Server` takes, such as bind, allow, lease and secret_file. The
            rest is as the trainer's variables say, such as FANIN_BIND and FANIN_ALLOW.

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
        own = ("world_id", "rank", "world_size", "name", "base_port", "open", "use_ucx")
        given = handed_on("ParameterServer", Server, more, *own)
        told = {name: given.pop(name, None) for name in options_of(Configured)}
        # What the server itself finds in the environment is not for this to judge.
        environ = {**os.environ, "FANIN_CAST": "", **dict.fromkeys(VARIABLES.values(), "")}
        config = trainer_config(environ=environ, snapshot=snapshot, **told)
        address = config.bind or "127.0.0.1"
        self.name = name
        self.running = False
        self._snapshot = config.snapshot
        self._server = Server(
            world_id=os.urandom(16),
            rank=0,
            world_size=1,
            name=name,
            base_port=port,
            open=not is_loopback(address),
            use_ucx=not tcp_only,
            **{**{one: getattr(config, one) for one in told}, "bind": address},
            **given,
        )
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._closed = False
        self._store: dict[str, _Entry] = {}
        self._steps: dict[str, int] = {}
        self._open: set[str] | None = None  # publications of an updating(), None: outside of one
        self._torn: set[str] = set()  # half-written, after an exception in updating()
        self._last: dict[str, tuple[float, float]] = {}  # when it was committed, how long it took
        self._due: dict[str, threading.Timer] = {}  # changed, and who commits it later
        self._lent: dict[int, dict[str, _Entry]] = {}  # by storage, of PyTorch's tensors
        self._counting = False
        self._streams: dict[str, Any] = {}  # whose end the last commit waits for
        _log.info("parameter server %s listens on %s, port %d", name, address, self.port)

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self._server.port

    @property
    def steps(self) -> dict[str, int]:
        """The last step, by publication: as many as changes were made, unless steps were given."""
        with self._lock:
            return dict(self._steps)

    # ---------------------------------------------------------------- changes

    def put(self, key: str, tensor: Any) -> None:
        """Registers *tensor*, a PyTorch tensor or NumPy array, by reference, and publishes it.

        Many tensors are registered fastest inside one :meth:`updating`. Blocks at most the lease,
        and for what the current stream still writes to a CUDA tensor.
        Raises ValueError if the key is there already, RequestError if the memory cannot be served.
        """
        with self._lock:
            self._alive()
            if key in self._store:
                raise ValueError(f"key {key!r} is there already: update() replaces a tensor")
            publication, name = split_key(key)
            shard = shard_of(name, tensor)
            self._finish_writes(shard)
            self._server.put(publication, [shard])  # not seen by readers before a commit
            with self._change(publication):
                self._keep(key, _Entry(tensor, shard))

    def update(self, key: str, tensor: Any) -> None:
        """Puts *tensor* in the place of the key's, which may be the same, and publishes it.

        To change a registered tensor's values use :meth:`updating`. A write before this call lets
        readers in between. Where PyTorch counts the writes, it is a StateError. Blocks at most the
        lease.

        Raises:
            KeyError: the key does not exist.
            RequestError: the memory cannot be served.
            StateError: PyTorch has written the tensor outside of :meth:`updating`.
        """
        with self._lock:
            self._alive()
            if key not in self._store:
                raise KeyError(f"no key {key!r}: put() adds a tensor")
            publication, name = split_key(key)
            if self._open is None:
                self._refuse_written([key])
            shard = shard_of(name, tensor)
            self._finish_writes(shard)
            with self._change(publication):
                self._replace(publication, key, _Entry(tensor, shard))

    def remove(self, key: str) -> None:
        """Takes the tensor out; when this returns, nobody reads its memory any more.

        Blocks at most the lease. Raises KeyError if the key is not there.
        """
        with self._lock:
            self._alive()
            if key not in self._store:
                raise KeyError(f"no key {key!r}")
            publication, name = split_key(key)
            if not any(split_key(one)[0] == publication for one in self._store if one != key):
                self._server.remove(publication)
                self._torn.discard(publication)
                self._done(publication)
                self._streams.pop(publication, None)
                self._steps[publication] = self._steps.get(publication, 0) + 1
                if self._open is not None:
                    self._open.discard(publication)
                self._release(key)
                return
            with self._change(publication):
                self._server.remove(publication, name)
                self._release(key)

    def _publications(self) -> list[str]:
        """Those that have tensors."""
        return list(dict.fromkeys(split_key(key)[0] for key in self._store))

    def _replace(self, publication: str, key: str, entry: _Entry) -> None:
        self._server.put(publication, [entry.shard], replace=True)
        self._keep(key, entry)

    def _tell_what_moved(self) -> None:
        """``p.data = ...`` and ``module.to()`` give a tensor other memory, of which nobody tells:
        what is registered would be published as the new step, and is what it was before."""
        for key, entry in list(self._store.items()):
            publication, name = split_key(key)
            try:
                if entry.moved:
                    _refuse_offloaded(entry.tensor)
                    shard = shard_of(name, entry.tensor)
                    self._replace(publication, key, _Entry(entry.tensor, shard))
            except (FaninError, RuntimeError) as error:  # PyTorch's: it has no memory at all
                raise StateError.make(
                    f"the memory of '{key}' was replaced, and what it has now cannot be served: "
                    f"{error.message if isinstance(error, FaninError) else error}",
                    "bring the tensor back before updating() ends, or remove() it before it is "
                    "offloaded and put() it afterwards",
                    key=key,
                ) from error

    def _keep(self, key: str, entry: _Entry) -> None:
        self._release(key, entry)
        if entry.extent is None or self._snapshot:
            return
        self._lent.setdefault(entry.extent.storage, {})[key] = entry
        if not self._counting:
            from fanin.torch._writes import count_steps

            count_steps(self, ParameterServer._published)
            self._counting = True

    def _release(self, key: str, new: _Entry | None = None) -> None:
        """The key's entry counts no writes any more; *new* stands in its place."""
        old = self._store.get(key)
        if old is not None and old.extent is not None:
            there = self._lent.get(old.extent.storage, {})
            there.pop(key, None)
            if not there:  # storages come and go
                self._lent.pop(old.extent.storage, None)
        if new is None:
            del self._store[key]
        else:
            self._store[key] = new

    def _published(self, param: Any) -> list[Any]:
        """The tensors that lie where the parameter *param* does, if any."""
        if not self._lent:
            return []
        from fanin.torch._writes import extent_of

        written = extent_of(param)
        there = self._lent.get(written.storage, {}) if written is not None else {}
        return [one.tensor for one in list(there.values()) if one.extent.overlaps(written)]

    @contextlib.contextmanager
    def updating(self, step: int | None = None) -> Iterator[None]:
        """In this block registered tensors may be written; its end publishes them as one step.

        A tensor may also get other memory (``p.data = ...``, ``module.to()``). The end registers
        the memory that the tensor has then. Give another tensor object in its place to ``update``.

        The call first waits for running readers, at most the lease. New readers wait until the
        block has ended, and until the work on the current streams is done. CUDA tensors are written
        on these streams. ``put``, ``update`` and ``remove`` inside belong to the same step. Other
        threads' changes wait. Blocks do not nest.

        If the block raises, the tensors may be half-written. Readers then see nothing until a later
        updating() has ended well.

        Args:
            step: of all publications, above their last; None: each one's next.

        Raises:
            ValueError: before the block: *step* is not above the last one.
            StateError: before the block: PyTorch has written tensors outside of such a block.
                Readers see nothing until the next block has ended well. At the end: memory of the
                named key cannot be served.
            RuntimeError: the calling thread is in such a block already.
        """
        with self._lock:
            self._alive()
            if self._open is not None:
                raise RuntimeError("updating() is called inside updating()")
            last = max((self._steps.get(p, 0) for p in self._publications()), default=0)
            if step is not None and step <= last:
                raise ValueError(f"step {step} is not above the last one, {last}")
            self._refuse_written(self._store)
            self._open = set()
            try:
                for publication in self._publications():
                    self._begin(publication)
                yield
                self._tell_what_moved()
                for publication in sorted(self._open):
                    number = self._steps.get(publication, 0) + 1 if step is None else step
                    self._commit(publication, number, self._stream(publication))
                for entry in self._store.values():
                    entry.published()
            except BaseException:
                for publication in self._open:
                    self._abort(publication)
                raise
            finally:
                self._open = None

    def _refuse_written(self, keys: Iterable[str]) -> None:
        """Readers may have got half of what was written while they could read it."""
        if self._snapshot:
            return
        written = [
            key for key in keys if self._store[key].written and split_key(key)[0] not in self._torn
        ]
        if not written:
            return
        for publication in {split_key(key)[0] for key in written}:
            self._torn.add(publication)
            self._done(publication)
            with contextlib.suppress(StateError):
                self._server.withdraw(publication)
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        raise StateError.make(
            f"'{written[0]}'{more} was written outside of updating(): its readers may have got "
            "half of what was written. It is withdrawn until the next updating() ends",
            "write registered tensors inside: with server.updating(): optimizer.step()",
            key=written[0],
        )

    @contextlib.contextmanager
    def _change(self, publication: str) -> Iterator[None]:
        """A change of which tensors there are, not of their bytes: published even if it fails."""
        if self._open is not None:
            if publication not in self._open:
                self._begin(publication)
            yield
            return
        if publication not in self._due:
            self._synchronize(publication)
            self._server.begin_update(publication)
        try:
            yield
        finally:
            self._steps[publication] = self._steps.get(publication, 0) + 1
            if publication not in self._torn:
                self._commit_soon(publication)

    def _commit_soon(self, publication: str) -> None:
        """Commits, or leaves it to a timer if commits would take most of the time.

        A commit of many tensors takes milliseconds, and code that puts thousands one by one is
        usual. Readers wait while a publication is due, so they never miss what was put.
        """
        at, took = self._last.get(publication, (0.0, 0.0))
        left = at + 4 * took - time.monotonic()
        if took < 0.001 or left <= 0:
            self._commit(publication, self._steps[publication], None)
        elif publication not in self._due:
            timer = self._due[publication] = threading.Timer(left, self._commit_due, (publication,))
            timer.daemon = True
            timer.start()

    def _commit_due(self, publication: str) -> None:
        with self._lock:
            if self._due.get(publication) is not threading.current_thread():
                return
            try:
                self._commit(publication, self._steps[publication], None)
            except Exception as error:
                self._done(publication)
                self._torn.add(publication)
                _log.error("%s cannot be published: %s", publication, error)

    def _done(self, publication: str) -> None:
        """Nothing of it is due any more."""
        if timer := self._due.pop(publication, None):
            timer.cancel()

    def _begin(self, publication: str) -> None:
        assert self._open is not None
        self._server.begin_update(publication)
        self._open.add(publication)

    def _commit(self, publication: str, step: int, stream: Stream | None) -> None:
        started = time.monotonic()
        self._server.commit(publication, step, snapshot=self._snapshot, stream=stream)
        self._steps[publication] = step
        self._last[publication] = (time.monotonic(), time.monotonic() - started)
        self._done(publication)
        self._torn.discard(publication)

    def _abort(self, publication: str) -> None:
        self._torn.add(publication)
        self._done(publication)
        try:
            self._server.abort_update(publication)
        except FaninError as error:  # of a publication that this block has committed already
            _log.debug("no update of %s to abort: %s", publication, error)
            self._torn.discard(publication)

    # ------------------------------------------------------------------- CUDA

    def _finish_writes(self, shard: Shard) -> None:
        """Waits for what this thread's stream still writes to a tensor that is registered."""
        if _device(shard) >= 0:
            import torch

            torch.cuda.current_stream(_device(shard)).synchronize()

    def _synchronize(self, publication: str) -> None:
        """Waits for the writes whose end the last commit waits for: a new one withdraws it."""
        stream = self._streams.pop(publication, None)
        if stream is not None:
            stream.synchronize()

    def _stream(self, publication: str) -> Stream | None:
        """The stream of this thread that writes the tensors, if they are on one CUDA device."""
        mine = [one for key, one in self._store.items() if split_key(key)[0] == publication]
        devices = sorted({_device(one.shard) for one in mine} - {-1})
        if not devices:
            return None
        import torch

        streams = [torch.cuda.current_stream(device) for device in devices]
        if self._streams.get(publication) not in (None, streams[0]):
            self._synchronize(publication)
        if len(streams) == 1:
            self._streams[publication] = streams[0]
            return Stream(streams[0].cuda_stream, devices[0])
        for stream in streams:
            stream.synchronize()
        return None

    # ---------------------------------------------------------------- looking

    def get(self, key: str) -> Any:
        """The registered tensor itself, None if there is none. Does not block."""
        entry = self._store.get(key)
        return None if entry is None else entry.tensor

    def keys(self) -> list[str]:
        """All keys, in the order in which they were put. Does not block."""
        return list(self._store)

    # -------------------------------------------------------------------- end

    def run(self) -> None:
        """Blocks until :meth:`stop` or :meth:`shutdown`; readers are served without it, too."""
        if self._closed:
            return
        self.running = True
        try:
            self._stop.wait()
        finally:
            self.running = False
            self._stop.clear()

    def stop(self) -> None:
        """Lets :meth:`run` return, also one that is called only afterwards. Any thread."""
        self._stop.set()

    def shutdown(self) -> None:
        """Ends the server: readers are cut off and no tensor is held any more.

        Blocks for running reads, at most a second, and for :meth:`updating` in another thread. A
        second call does nothing.
        """
        self.stop()
        with self._lock:
            if not self._closed:
                self._closed = True
                for publication in list(self._due):
                    self._done(publication)
                self._server.close()
                self._store.clear()
                self._lent.clear()

    def _alive(self) -> None:
        if self._closed:
            raise RuntimeError(f"parameter server {self.name} is shut down")

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _device(shard: Shard) -> int:
    return -1 if shard.device is None else shard.device
