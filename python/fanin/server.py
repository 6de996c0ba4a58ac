# SPDX-License-Identifier: Apache-2.0
"""The parameter server of one trainer rank: lends its shards to inference workers."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _ffi
from ._exit import ClosableHandle, OpenHandles
from ._library import (
    c_string,
    check,
    checked,
    dtype_code,
    initialised,
    integer,
    library,
    milliseconds,
    new_error,
    text,
)
from ._log import log_target
from ._options import ServerOptions, filled, takes
from ._tensors import PackedTensors, Shard, pack
from .errors import ProcessError, RequestError, StateError

if TYPE_CHECKING:
    from ._exporter import MetricsPage


#: Counters since creation, and gauges, by the names of ``fanin_server_stats``: ``pulls_good``,
#: ``commits``, ``leases``... Times are in nanoseconds (``drain_wait_ns_max``).
#: Numbers, by name; "held_up_by" is text, "drain_waits" a list of counts.
ServerStats = dict[str, Any]

#: A run, ``0``, ``"0"`` or ``"policy"``, or the whole name of its publication, ``"lora:policy"``.
Run = str | int

_PUBLICATION = re.compile(r"(?:(?:lora|full):)?[A-Za-z0-9._-]{1,64}")

# What close() waits for calls of other threads: none takes longer than 60 s and a little.
_CLOSE_SECONDS = 75.0
# The same at the interpreter's exit.
_EXIT_SECONDS = 5.0


class _Use:
    """A call that is under way."""

    __slots__ = ("thread",)

    def __init__(self, thread: int) -> None:
        self.thread = thread


class Stream(NamedTuple):
    """A CUDA stream."""

    #: ``cudaStream_t`` as an integer (``torch.cuda.Stream.cuda_stream``); 0: the default stream.
    handle: int
    #: CUDA device of the stream.
    device: int


def c_stream(stream: Stream | None) -> _ffi.Stream:
    """For the library, to which 0 means that there is no stream."""
    if stream is None:
        return _ffi.Stream(None, 0)
    if not isinstance(stream, tuple) or len(stream) != 2:
        raise RequestError.make(
            f"the stream is {stream!r}",
            "give fanin.Stream(s.cuda_stream, s.device_index) of a torch.cuda.Stream s",
        )
    return _ffi.Stream(integer(stream[0], "the stream", 64) or 1, integer(stream[1], "device", 31))


def publication_of(run: Run) -> str:
    """The publication of a run: ``"lora:0"`` for ``0``, ``"0"`` and ``"lora:0"``.

    Raises:
        RequestError: not 1 to 64 of ``A-Z a-z 0-9 . _ -``, after ``lora:`` (or ``full:``) or alone.
    """
    name = str(run) if isinstance(run, int) and not isinstance(run, bool) else run
    if not isinstance(name, str) or not _PUBLICATION.fullmatch(name):
        raise RequestError.make(
            f"{run!r} is no run", 'name it by 1 to 64 of A-Z a-z 0-9 . _ - ("lora:<run>" too)'
        )
    return name if ":" in name else f"lora:{name}"


def _c_publication(run: Run) -> bytes:
    return publication_of(run).encode()


class Server(ClosableHandle):
    """Lends one trainer rank's shards to readers, between two updates of the weights.

    The server registers shards by reference and copies nothing. It keeps a reference to each
    shard's owner until the shard is replaced or removed, or the server is closed. Weights are
    written in place between :meth:`begin_update` and :meth:`commit`.

    Any thread may call any method, several at once. All methods release the GIL. The library's own
    threads need no Python. No method blocks for more than a minute or so. Python handles signals
    when the call has ended. A server closes at :meth:`close`, at the end of a ``with`` block, or
    when the interpreter exits.

    Peers and strangers: a peer is one place that readers connect from: an IPv4 address, a /64 of
    IPv6 or this host. The own user is a peer of its own, by the Unix socket. A stranger is any
    other peer of a server that has no secret and no certificates. With *trusted_network* no peer is
    a stranger.

    In a forked child every method raises :class:`ProcessError` and touches nothing.

    Raises:
        RequestError: an argument is wrong; the port is in use (``FANIN_ERR_EXISTS``).
        ConnectionFailedError: the limit of open files has no room for its connections.
        HostError: the C library cannot be loaded; no memory, no sockets.
    """

    @takes(ServerOptions)
    def __init__(self, options: ServerOptions) -> None:
        self._handle: ctypes.c_void_p | None = None
        self._pid = os.getpid()
        self._library = library()
        config = filled(_ffi.ServerConfig, self._library.fanin_server_config_init, options)
        config.log, config.log_cookie = log_target("server")

        self._options = options
        self._world_id = bytes(config.world_id).hex()
        self._closing = False
        self._idle = threading.Condition()
        self._calls: set[_Use] = set()  # under way
        # Changes of the shards come one after the other: the owners that are kept must be those
        # of the shards that are registered.
        self._shards = threading.Lock()
        self._owners: dict[str, dict[str, object]] = {}
        # Shards of calls whose outcome is not known. A call that is interrupted by an exception
        # on its way back leaves its entry, which keeps too much alive rather than too little.
        self._transit: dict[object, PackedTensors] = {}

        handle = ctypes.c_void_p()
        checked(self._library.fanin_server_create, ctypes.byref(config), ctypes.byref(handle))
        self._handle = handle
        self._pages: list[MetricsPage] = []
        self._port = int(self._library.fanin_server_port(handle))
        _open.add(self)

    # ------------------------------------------------------------------------------ identity

    @property
    def name(self) -> str:
        """Without the rank."""
        return self._options.name

    @property
    def rank(self) -> int:
        """This server's rank."""
        return self._options.rank

    @property
    def world_size(self) -> int:
        """Ranks of the trainer."""
        return self._options.world_size

    @property
    def world_id(self) -> str:
        """32 hexadecimal digits."""
        return self._world_id

    @property
    def port(self) -> int:
        """The TCP port that the server listens on (or did, once closed)."""
        return self._port

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._handle is None or self._closing

    # ------------------------------------------------------------------------------ the shards

    def put(
        self, run: Run, shards: Iterable[Shard] | PackedTensors, *, replace: bool = False
    ) -> None:
        """Registers this rank's shards of *run*, all or none.

        The memory is lent, not copied; each shard's owner is kept until the shard is replaced or
        removed. Inside an update the change belongs to it. Otherwise new shards become visible with
        the next commit. All ranks put all names of a publication. A rank that holds nothing of a
        tensor puts a shard without boxes. If only a dead rank has put a name, new readers do not
        know the name. They take the other ranks' names for all.

        Args:
            replace: exchange shards that exist. If all is equal, nothing happens. Otherwise the
                call acts as :meth:`begin_update` first, outside an update. It then blocks at most
                the lease, and the publication is unreadable until the next commit.

        Raises:
            RequestError: a shard is wrong (overlapping boxes, a box outside of the shape, a name
                twice); ``FANIN_ERR_EXISTS``: a name is there already.
            PullTimeoutError: a snapshot's copy of the shards has not ended for 60 s.
            ConnectionFailedError: a limit: tensors, boxes, publications and their names.
            PeerError: CUDA memory, and no CUDA in this process or build.
            HostError: no memory.
        """
        packed = shards if isinstance(shards, PackedTensors) else pack(shards)
        publication = publication_of(run)
        name = publication.encode()
        error = new_error()

        def call(handle: ctypes.c_void_p) -> int:
            token = object()
            with self._shards:
                self._transit[token] = packed
                status = int(
                    self._library.fanin_server_put(
                        handle,
                        name,
                        packed.address or None,
                        len(packed),
                        replace,
                        ctypes.byref(error),
                    )
                )
                if status == _ffi.OK:
                    kept = self._owners.setdefault(publication, {})
                    kept.update((shard.name, shard.owner) for shard in packed.shards)
                del self._transit[token]
            return status

        check(self._enter(call), error)

    def remove(self, run: Run, name: str | None = None) -> None:
        """Removes one shard, or the whole publication if *name* is None.

        Outside an update it acts as :meth:`begin_update` first: blocks at most the lease. When it
        returns, the library does not touch the memory any more and its owner is let go. (Workers
        of this host may still map CUDA memory that they read; the log says who.)

        Raises:
            NotFoundError: there is no such publication or shard.
            PullTimeoutError: a snapshot's copy has not ended for 60 s; nothing was removed.
        """
        publication = publication_of(run)
        raw = publication.encode()
        raw_name = None if name is None else c_string(name, "the tensor's name")
        error = new_error()

        def call(handle: ctypes.c_void_p) -> int:
            with self._shards:
                status = int(
                    self._library.fanin_server_remove(handle, raw, raw_name, ctypes.byref(error))
                )
                if status == _ffi.OK and name is None:
                    self._owners.pop(publication, None)
                elif status == _ffi.OK:
                    self._owners.get(publication, {}).pop(str(name), None)
            return status

        check(self._enter(call), error)

    def set_metadata(self, run: Run, metadata: Mapping[str, str]) -> None:
        """Replaces the publication's metadata (the same on all ranks) from the next commit on.

        Keys that have a meaning: ``peft_config`` (the whole adapter_config.json as text), or
        ``lora_alpha``, ``r``, ``base_model_name_or_path``, ``rank_pattern`` and so on.

        Raises:
            RequestError: a key or value is not text; more than 1 MiB in all.
        """
        pairs = [
            (c_string(key, "a metadata key"), c_string(value, f"metadata {key!r}"))
            for key, value in metadata.items()
        ]
        array = (_ffi.Pair * len(pairs))(*(_ffi.Pair(*pair) for pair in pairs))
        raw = _c_publication(run)
        self._call(self._library.fanin_server_set_metadata, raw, array, len(pairs))

    # ------------------------------------------------------------------------------ updates

    def begin_update(self, run: Run) -> None:
        """Announces that the weights are about to be written in place.

        New readers wait; running ones are waited for, at most the lease. Creates the publication.
        Of a snapshot publication readers go on, and it returns at once. One thread writes a
        publication: the commit of another one publishes what is half written.

        Raises:
            StateError: another thread is in it for the same publication, or it is paused.
            ConnectionFailedError: a limit: publications and their names.
        """
        self._call(self._library.fanin_server_begin_update, _c_publication(run))

    def commit(
        self,
        run: Run,
        step: int,
        *,
        snapshot: bool = False,
        wait: bool = False,
        cast: str | None = None,
        stream: Stream | None = None,
        deltas: int = 0,
    ) -> None:
        """Declares the publication's bytes to be those of *step* and lets readers in.

        By reference it waits for nobody; a snapshot waits at most the lease for readers of the
        arena that it fills. A first commit needs no :meth:`begin_update`.

        Args:
            step: above the last committed one.
            snapshot: publish copies, which readers may read while the weights are written. Costs
                twice the shards' memory; at every commit of a publication or at none.
            wait: return when the commit has taken effect, at most 60 s.
            cast: with *snapshot*: F32 shards are published as ``"BF16"`` or ``"F16"``.
            stream: the CUDA stream that writes the weights: the commit takes effect when the work
                that is on it now is done. None: everything is written already.
            deltas: with *snapshot*: so many patches are kept, at most 16, each with what one step
                has changed. Readers that ask for deltas (:meth:`fanin.Client.pull_into`) read them
                instead of the whole. The copies must lie in host memory, or on one CUDA device; of
                copies in several kinds of memory there are no patches. All patches together take
                at most an eighth of the copy's bytes, of host memory, and one that is larger is
                not made. They are made only while a reader is connected that has asked for deltas,
                and for *deltas* steps more, as it may come back.

        Raises:
            NotFoundError, RequestError: no such publication; the step is not above the last one; a
                cast or *deltas* without snapshot; *deltas* above 16.
            StateError: no update is open, or the publication is paused; snapshot and reference
                mixed; another thread's update, abort or removal came first.
            PullTimeoutError: 60 s passed.
            HostError: the device has failed, or no memory.
        """
        options: _ffi.CommitOptions = initialised(
            _ffi.CommitOptions, self._library.fanin_commit_options_init
        )
        options.flags = (_ffi.COMMIT_SNAPSHOT if snapshot else 0) | (
            _ffi.COMMIT_WAIT if wait else 0
        )
        options.cast = dtype_code(cast, "cast")
        options.stream = c_stream(stream)
        options.deltas = integer(deltas, "deltas", 32)
        self._call(
            self._library.fanin_server_commit,
            _c_publication(run),
            integer(step, "step", 64),
            ctypes.byref(options),
        )

    def abort_update(self, run: Run) -> None:
        """Ends an update without publishing: unreadable until a later commit.

        Of a snapshot publication the last snapshot stays readable.

        Raises:
            StateError: no update is open.
            NotFoundError: there is no such publication.
        """
        self._call(self._library.fanin_server_abort_update, _c_publication(run))

    def withdraw(self, run: Run) -> None:
        """Takes a published step back at once: its bytes were written outside of an update.

        Pulls that are reading start again, and the publication is unreadable until a later commit.
        Waits for no reader.

        Raises:
            StateError: nothing of it is readable by reference now. An update is open, or it is
                paused or was never committed. Or it is a snapshot, which the trainer cannot write.
            NotFoundError: there is no such publication.
        """
        self._call(self._library.fanin_server_withdraw, _c_publication(run))

    def pause(self, run: Run, reason: str = "trainer memory offloaded") -> None:
        """Announces that the shards' memory is about to be taken away: offload, sleep, a load.

        Blocks until running readers are done, at most the lease. A commit that is pending on a
        stream takes at most 60 s more. Until :meth:`resume` the library does not touch the shards'
        memory. Every pull fails at once with :class:`PausedError`, which says *reason*. Of a
        snapshot publication the last snapshot stays readable.

        While it is paused, shards can be put and removed without a wait, and metadata can be set.
        In a pause :meth:`abort_update` withdraws the published step, for a caller that brings other
        values back. Paused again: only the reason changes.

        Args:
            reason: one sentence for readers, cut to 255 bytes.

        Raises:
            NotFoundError: there is no such publication.
            StateError: an update is open, or another thread begins one.
            PullTimeoutError: the stream of a commit took more than 60 s.
        """
        self._call(
            self._library.fanin_server_pause, _c_publication(run), c_string(reason, "the reason")
        )

    def resume(self, run: Run) -> None:
        """Ends a pause: the step that was published is again, from the shards as they are now.

        The caller promises that all their bytes, moved or not, are those of that step. Does not
        block.

        Raises:
            NotFoundError: there is no such publication.
            StateError: it is not paused.
            HostError, ConnectionFailedError: memory or limits; it stays paused.
        """
        self._call(self._library.fanin_server_resume, _c_publication(run))

    # ------------------------------------------------------------------------------ looking

    def publications(self) -> list[str]:
        """Names of the publications. Does not block."""
        return self._list(None)

    def names(self, run: Run) -> list[str]:
        """Names of the publication's tensors on this rank. Waits for calls that change it.

        Raises:
            NotFoundError: there is no such publication.
        """
        return self._list(_c_publication(run))

    def _list(self, publication: bytes | None) -> list[str]:
        names: list[str] = []

        def add(_: int | None, name: bytes) -> bool:
            names.append(text(name))
            return True

        self._call(self._library.fanin_server_list, publication, _ffi.NameFn(add), None)
        return names

    def stats(self) -> ServerStats:
        """Counters since creation, and gauges. Does not block.

        ``held_up_by`` is the peer whose leases held an update up longest, ``held_up_ns_max`` how
        long; ``drains_cut`` counts updates that did not wait for a peer that had had its share.
        """
        stats = _ffi.ServerStats()
        stats.struct_size = ctypes.sizeof(stats)
        status = self._enter(
            lambda handle: self._library.fanin_server_get_stats(handle, ctypes.byref(stats))
        )
        check(status, new_error())
        values = {field[0]: getattr(stats, field[0]) for field in _ffi.ServerStats._fields_[1:]}
        values["held_up_by"] = text(values["held_up_by"])
        values["drain_waits"] = list(values["drain_waits"])
        return values

    def prometheus(self) -> str:
        """The same in Prometheus' text exposition format 0.0.4. Does not block."""
        size = 8192
        while True:
            content, length = self._prometheus(size)
            if length < size:
                return content
            size = length + 256

    def serve_metrics(self, host: str = "127.0.0.1", port: int = 0) -> MetricsPage:
        """Answers ``GET /metrics`` with :meth:`prometheus`, until the server or the page is closed.

        A thread of its own waits for scrapes, and each scrape has another. Scrapes within a second
        get the same page. A slow or silent scraper delays no other one, and is dropped after 5 s.
        Everybody who can reach *host* may ask. The page has no secret, but names of runs and the
        address that held an update up.

        Args:
            host: numeric address to listen on.
            port: 0: one that the system chooses; ``address`` of what is returned tells it.

        Raises:
            OSError: it cannot listen there.
            StateError: the server is closed.
        """
        from ._exporter import MetricsPage  # an HTTP server takes its time to be imported

        self.prometheus()
        server = weakref.ref(self)

        def page() -> str:
            me = server()
            if me is None:
                raise StateError.make("the server is closed")
            return me.prometheus()

        made = MetricsPage(page, host, port)
        self._pages.append(made)
        return made

    def _prometheus(self, size: int) -> tuple[str, int]:
        """What fits into *size* bytes, and the length of it all."""
        buffer, length = ctypes.create_string_buffer(size), ctypes.c_size_t()
        function = self._library.fanin_server_prometheus
        status = self._enter(lambda handle: function(handle, buffer, size, ctypes.byref(length)))
        check(status, new_error())
        return text(buffer.value), length.value

    # ------------------------------------------------------------------------------ the end

    def close(self, drain: float = 1.0) -> None:
        """Stops listening, lets running pulls end for at most *drain* seconds, and frees.

        Waits for calls of other threads first. When it returns, the library does not touch the
        shards' memory any more, and their owners are let go. Does nothing the second time, and
        in a forked child.

        Raises:
            StateError: calls of other threads have not ended for 75 s; the server is unusable and
                not freed.
        """
        if self._pid != os.getpid() or self._handle is None:
            return
        self._close(milliseconds(drain, "drain", zero=True), _CLOSE_SECONDS)

    def _close(self, drain_ms: int, patience: float) -> None:
        # A call of this very thread is one that a signal handler interrupts, and is not in the
        # library now: it will find the handle empty.
        own = threading.get_ident()
        limit = time.monotonic() + patience
        with self._idle:
            self._closing = True
            while any(use.thread != own for use in list(self._calls)):
                if time.monotonic() >= limit:
                    raise StateError.make(
                        "the server is closed while calls of other threads do not end",
                        "end the threads that use it first",
                    )
                # The timeout: a call that was interrupted may have left without a word.
                self._idle.wait(0.1)
            handle, self._handle = self._handle, None
        if handle is None:
            return
        _open.discard(self)
        while self._pages:
            self._pages.pop().close()
        self._library.fanin_server_destroy(ctypes.byref(handle), drain_ms)
        self._owners.clear()
        self._transit.clear()

    def _abandon(self) -> None:
        self._close(0, 0.0)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"port {self._port}"
        return f"<fanin.Server {self.name}_{self.rank} of {self.world_size}, {state}>"

    # ------------------------------------------------------------------------------ calls

    def _enter(self, call: Callable[[ctypes.c_void_p], int]) -> int:
        """Calls with the handle, which :meth:`close` leaves alone meanwhile."""
        if self._pid != os.getpid():
            raise ProcessError.make(
                f"the server belongs to the parent process {self._pid}",
                "create servers after the fork",
            )
        use = _Use(threading.get_ident())
        try:
            self._calls.add(use)
            handle = self._handle
            if handle is None or self._closing:
                raise StateError.make("the server is closed")
            return call(handle)
        finally:
            self._calls.discard(use)
            if self._closing:
                with self._idle:
                    self._idle.notify_all()

    def _call(self, function: Any, *arguments: Any) -> None:
        error = new_error()
        check(self._enter(lambda handle: function(handle, *arguments, ctypes.byref(error))), error)


def _close_at_exit(server: Server) -> None:
    if server._pid == os.getpid():
        server._close(1000, _EXIT_SECONDS)


_open: OpenHandles[Server] = OpenHandles(_close_at_exit)
