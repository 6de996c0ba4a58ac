# SPDX-License-Identifier: Apache-2.0
"""The client of an inference worker: pulls adapters from all ranks of a trainer."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from . import _ffi
from ._calls import Use
from ._library import c_string, checked, integer, milliseconds, new_error, text
from ._log import log_target
from ._options import ClientOptions, filled, takes
from ._puller import Puller, Report, c_addresses, finish, set_max_bytes
from ._records import (
    Entry,
    PublicationInfo,
    PullProgress,
    PullResult,
    RankInfo,
    RankState,
    WatchEvent,
    entry_at,
    publication_info,
    rank_info,
    rank_state,
    watch_event,
)
from ._tensors import PackedTensors, Shard
from .errors import RequestError
from .server import Stream, publication_of
from .session import PullSession

_T = TypeVar("_T")


def _path(directory: str | os.PathLike[str]) -> bytes:
    try:
        path = os.fsencode(directory)
    except (TypeError, UnicodeError):
        raise RequestError.make(f"the directory is {directory!r}, not a path") from None
    if b"\0" in path:
        raise RequestError.make(f"the directory {directory!r} contains a NUL character")
    return path


class Client(Puller):
    """Connects to every rank of a trainer, and pulls what it publishes.

    One thread at a time uses a client: a call while another one is under way raises
    :class:`StateError`. Only :meth:`cancel` and :meth:`close` may be called from any thread at any
    time. All calls release the GIL. Every blocking call has a timeout.

    For the main thread a helper thread makes the call, and callbacks run in that helper. An
    exception of a signal's handler, such as KeyboardInterrupt, cancels the call. It is raised when
    the call has ended, within a moment. In any other thread the call is made directly.

    An exception of a callback cancels the call, and the call raises it.

    A client closes at :meth:`close`, at the end of a ``with`` block, or when the interpreter exits.
    In a forked child every method raises :class:`ProcessError` and touches nothing.

    Raises:
        RequestError: an argument is wrong.
        HostError: the C library cannot be loaded; no memory.
    """

    _kind = "client"

    @takes(ClientOptions)
    def __init__(self, options: ClientOptions) -> None:
        super().__init__()
        config = filled(_ffi.ClientConfig, self._library.fanin_client_config_init, options)
        config.log, config.log_cookie = log_target("client")

        handle = ctypes.c_void_p()
        checked(self._library.fanin_client_create, ctypes.byref(config), ctypes.byref(handle))
        self._made(handle)
        if options.addresses is not None:
            try:
                self.connect(options.addresses, options.connect_timeout)
            except BaseException:
                self.close()
                raise

    # ------------------------------------------------------------------------------ connections

    def connect(self, addresses: Sequence[str], timeout: float = 5.0) -> None:
        """Connects to all ranks at once and learns who they are.

        Succeeds when at least one rank of one world answers; the others are tried again by each
        pull. Connections to other addresses are closed.

        Args:
            addresses: ``"host:port"`` or ``"[v6]:port"``, one a rank, in any order.
            timeout: seconds, for the whole call.

        Raises:
            RequestError: an address is malformed or there twice.
            UnreachableError: nobody answered.
            PeerError: ranks of different worlds, a rank twice, another server's name, another
                protocol version.
            PullTimeoutError, CancelledError: as named.
        """
        array = c_addresses(addresses)
        self._call(
            "connect",
            self._library.fanin_client_connect,
            array,
            len(array),
            milliseconds(timeout, "timeout"),
        )

    def disconnect(self) -> None:
        """Closes all connections, forgets catalogs and addresses. Waits for no rank."""
        self._alone("disconnect", lambda _, h: self._library.fanin_client_disconnect(h))

    # ------------------------------------------------------------------------------ pulls

    def pull_adapter(
        self,
        run: str | int,
        directory: str | os.PathLike[str],
        *,
        step: int | None = None,
        at_least: int | None = None,
        timeout: float = 60.0,
        max_attempts: int = 0,
        dtype: str | None = None,
        spare_file: bool = False,
        trust_config: bool = False,
        max_bytes: int | None = None,
        verify: bool = False,
        progress: Callable[[int, int], None] | None = None,
        rank_progress: Callable[[PullProgress], None] | None = None,
    ) -> PullResult:
        """Writes a run's adapter as a PEFT directory, which appears whole or not at all.

        The files are adapter_model.safetensors, adapter_config.json and fanin.json. *directory*
        does not exist, is empty, or holds the same adapter of the same step and world. Of the same
        adapter the call compares the files with their digests, and the result says *reused*. If
        ranks were started again since, it pulls and replaces the directory, and logs which. It
        uses nothing that another user could have put there. Two processes that ask for one
        directory at once pull once. The call removes half-made adapters of killed pulls beside it
        (:func:`fanin.sweep_adapter_directory`).

        Args:
            run: ``0``, ``"0"`` or ``"lora:0"``.
            step: this very step: waits for it.
            at_least: this step or a later one. Neither: the newest that all ranks have.
            timeout: seconds, for the whole call.
            max_attempts: give up after so many attempts that updates overtook; 0: by time only.
            dtype: "BF16" or "F16": F32 tensors arrive rounded to that; None: as published.
            spare_file: keep a file of the adapter's size ready for the next pull into the same
                parent directory. It costs the adapter's size once more, until :meth:`disconnect` or
                until a pull finds that another process has made its directory. The client keeps
                none where less than the same size again would stay free.
            trust_config: keep every field of the trainer's PEFT configuration. Otherwise those that
                can load code, name files or are not known are left out, and logged.
            max_bytes: refuse a larger adapter before anything is made. None: a quarter of the file
                system's size.
            verify: compare the bytes that landed with digests that the ranks make under their
                leases. A difference is :class:`HostError` (``FANIN_ERR_TRANSPORT``), and nothing is
                published.
            progress: called with (bytes done, bytes in all) while it reads, some 20 times a second.
            rank_progress: likewise with what each rank has brought, and which one it waits for.
                Without it a rank that brings nothing for 5 s, 10 s, 20 s and so on is told in the
                log.

        Raises:
            NotFoundError: no such run.
            SupersededError: *step* has passed.
            PausedError: the trainer's memory is offloaded.
            StaleError: *max_attempts* updates overtook the pull.
            PullTimeoutError, CancelledError: as named.
            ConnectionFailedError: a rank that holds bytes is lost and does not answer.
            PeerError: ranks contradict each other, or do not cover every tensor.
            HostError: disk full, no permission, no memory.
            RequestError: an argument is wrong; *directory* holds something else, or what another
                user could have put there (``FANIN_ERR_EXISTS``); no addresses
                (:class:`StateError`).
        """
        options = self._options(run, step, at_least, timeout, max_attempts, dtype, None)
        options.spare_file = spare_file
        options.trust_config = trust_config
        set_max_bytes(options, max_bytes)
        options.verify = verify
        into = self._library.fanin_client_pull_adapter, _path(directory)
        return self._pull("pull_adapter", options, (progress, rank_progress), lambda: into)

    def pull_model(
        self,
        run: str | int,
        directory: str | os.PathLike[str],
        *,
        step: int | None = None,
        at_least: int | None = None,
        timeout: float = 3600.0,
        max_attempts: int = 0,
        dtype: str | None = None,
        max_file_bytes: int | None = None,
        trust_config: bool = False,
        max_bytes: int | None = None,
        verify: bool = False,
        delta_from: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
        rank_progress: Callable[[PullProgress], None] | None = None,
    ) -> PullResult:
        """Writes a run's tensors as a model's directory, which appears whole or not at all.

        As ``save_pretrained()`` lays it out: one model.safetensors, or
        model-00001-of-0000N.safetensors and so on with model.safetensors.index.json; config.json
        if the trainer publishes one (metadata "config"); fanin.json. Tensors keep the names under
        which they are published. *directory* must not exist, be empty, or hold the same step of
        the same world in the same files, as with :meth:`pull_adapter`; or be *delta_from*.

        The other parameters and what is raised: as :meth:`pull_adapter`.

        Args:
            run: ``"full:0"``; ``0`` and ``"0"`` are ``"full:0"`` too.
            timeout: seconds, for the whole call: an hour.
            max_file_bytes: of tensors in one file, ``save_pretrained()``'s *max_shard_size*; a
                larger tensor gets a file of its own; None: 5 GB.
            trust_config: keep auto_map and custom_pipelines of the trainer's config.json, which
                name code to load. Otherwise they are left out, and logged.
            max_bytes: refuse a larger model before anything is made; None: as large as there is
                room for.
            delta_from: a directory that such a call has made of an earlier step: its files are
                copied, and what has changed since is read, if the trainer keeps that (*deltas* of
                :meth:`fanin.Server.commit`); otherwise the whole, and ``whole_because`` says why.
                The ranks' digests prove the result. The directory itself: it is replaced.
        """
        name = publication_of(run)
        if isinstance(run, int) or ":" not in run:
            name = "full:" + name.removeprefix("lora:")
        options = self._options(name, step, at_least, timeout, max_attempts, dtype, None)
        options.trust_config = trust_config
        set_max_bytes(options, max_bytes)
        if max_file_bytes is not None:
            options.max_file_bytes = integer(max_file_bytes, "max_file_bytes", 64)
            if max_file_bytes == 0:
                raise RequestError.make("max_file_bytes is 0", "leave it out: 5 GB")
        options.verify = verify
        if delta_from is not None:
            options.delta_from = _path(delta_from)
        into = self._library.fanin_client_pull_model, _path(directory)
        return self._pull("pull_model", options, (progress, rank_progress), lambda: into)

    def pull_into(
        self,
        run: str | int,
        tensors: Mapping[str, Any] | Iterable[Shard] | PackedTensors,
        *,
        step: int | None = None,
        at_least: int | None = None,
        timeout: float = 60.0,
        max_attempts: int = 0,
        dtype: str | None = None,
        verify: bool | None = None,
        stream: Stream | None = None,
        max_bytes: int | None = None,
        deltas: bool = False,
        progress: Callable[[int, int], None] | None = None,
        rank_progress: Callable[[PullProgress], None] | None = None,
    ) -> PullResult:
        """Fills memory of the caller with a run's tensors, or parts of them.

        On success all hold the bytes of one step. On failure their content is undefined, and
        nothing writes them after the return.

        With *deltas* a pull reads what has changed since the step that it brought there last, if
        the trainer keeps patches (``commit(..., deltas=4)``), all ranks are read by stream, and it
        is at most half of the bytes. Otherwise it reads the whole, and the result's *whole_because*
        says why. The caller promises that between two such pulls nothing else writes the memory, or
        calls :meth:`PackedTensors.touched`. ::

            packed = fanin.pack(fanin.shard_of(name, one) for name, one in tensors.items())
            while True:
                result = client.pull_into("full:0", packed, at_least=step + 1, deltas=True)
                step = result.step

        The other arguments, and other errors, are those of :meth:`pull_adapter`.

        Args:
            tensors: arrays, tensors or buffers by name, each a whole tensor of the catalog's dtype
                and shape and writable (see :func:`fanin.shard_of`). Or shards, which may also be
                parts of tensors. Or what :func:`fanin.pack` made of shards, for a pull that is
                repeated. Tensors that are not named are not read.
            dtype: as :meth:`pull_adapter`; memory that is described as F32 gets F32 as it is.
            stream: CUDA destinations are written only after the work that is on this stream now.
                None: PyTorch's current stream of its tensors' device, on which what used their
                memory before may still run. No stream has to wait for the writes.
            max_bytes: refuse to bring more; None: as many as *tensors* hold.
            verify: as :meth:`pull_adapter`; None: as *deltas*. What patches have made is compared
                too: where it differs, the same call reads the whole.
            deltas: *tensors* is what :func:`fanin.pack` made.

        Raises:
            NotFoundError: no such run or tensor.
            PeerError: a tensor's dtype or shape is another one (``FANIN_ERR_MISMATCH``).
            RequestError: *tensors* is empty, or one is read-only; *deltas*, and *tensors* is not
                what :func:`fanin.pack` made.
        """
        if deltas and not isinstance(tensors, PackedTensors):
            raise RequestError.make(
                "deltas are asked for into memory that is described anew at each call",
                "pack it once: fanin.pack(fanin.shard_of(name, one) ...), and give that each time",
            )
        verify = deltas if verify is None else verify
        packed, memory, options = self._filling(
            run, tensors, step, at_least, timeout, max_attempts, dtype, stream, max_bytes, verify
        )
        options.deltas = deltas
        lib = self._library
        functions = lib.fanin_client_pull, lib.fanin_client_pull_into
        into = partial(self._into, packed, memory, *functions, at_once=deltas)
        return self._pull("pull_into", options, (progress, rank_progress), into)

    def begin(
        self,
        run: str | int,
        tensors: Mapping[str, Any] | Iterable[Shard] | PackedTensors,
        *,
        step: int | None = None,
        at_least: int | None = None,
        timeout: float = 60.0,
        dtype: str | None = None,
        verify: bool = False,
        stream: Stream | None = None,
        max_bytes: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        rank_progress: Callable[[PullProgress], None] | None = None,
    ) -> PullSession:
        """Begins a pull that fills memory in several calls, all of one step: :class:`PullSession`.

        Connects, waits for the step, plans everything and begins on the ranks; reads nothing. The
        parameters and what is raised: as :meth:`pull_into`, and

        Args:
            timeout: seconds, for the whole session: from this call to the end of
                :meth:`PullSession.end`.
            verify: compare each part before its :meth:`PullSession.read` returns.
            stream: each read comes after the work that is on this stream when it is called; None:
                PyTorch's current one when this method is.
            progress: called with the bytes done, and in all, of the whole session; likewise
                *rank_progress*.
        """
        packed, memory, options = self._filling(
            run, tensors, step, at_least, timeout, 0, dtype, stream, max_bytes, verify
        )
        self._tell(options, self._session_report(), progress, rank_progress)
        session = PullSession(self, packed, (options, stream, memory))
        handle, lib = ctypes.c_void_p(), self._library
        functions = lib.fanin_client_begin, lib.fanin_client_begin_into
        into = partial(self._into, packed, memory, *functions)

        def call(use: Use, own: ctypes.c_void_p) -> None:
            function, *arguments = into()
            try:
                self._run(
                    use, function, own, ctypes.byref(options), *arguments, ctypes.byref(handle)
                )
                session._opened(handle)
            except BaseException:  # a callback's: it may have begun all the same
                lib.fanin_session_abandon(ctypes.byref(handle))
                raise

        try:
            self._alone("begin", call)
        except BaseException:  # an interrupt: likewise
            session._abandon()
            raise
        return session

    def wait(
        self,
        run: str | int,
        *,
        step: int | None = None,
        at_least: int | None = None,
        timeout: float = 60.0,
    ) -> int:
        """Waits for a step as a pull does, and reads nothing of it; the step that has come.

        *run*, *step*, *at_least*, *timeout* and what is raised: as :meth:`pull_adapter`, as far
        as it concerns steps and connections. The connections stay.
        """
        options = self._options(run, step, at_least, timeout, 0, None, None)
        found = ctypes.c_uint64()

        def call(use: Use, handle: ctypes.c_void_p) -> None:
            self._run(
                use,
                self._library.fanin_client_wait,
                handle,
                ctypes.byref(options),
                ctypes.byref(found),
            )

        self._alone("wait", call)
        return found.value

    def _session_report(self) -> Report:
        """The same of a session, whose calls are uses of their own."""
        client = weakref.ref(self)  # the session keeps it alive, and this must not

        def report(tell: Callable[[], None]) -> None:
            own = client()
            use = own._uses.get("use") if own is not None else None
            if own is not None and use is not None:
                own._report(use, tell)

        return report

    # ------------------------------------------------------------------------------ looking

    def ranks(self) -> list[RankInfo]:
        """The ranks as last seen. Does not block.

        Raises:
            StateError: no addresses.
        """
        found: list[RankInfo] = []
        error = new_error()

        def call(use: Use, handle: ctypes.c_void_p) -> None:
            add = _ffi.RankFn(_collect(use, lambda info: found.append(rank_info(info.contents))))
            status = self._library.fanin_client_ranks(handle, add, None, ctypes.byref(error))
            finish(use, status, error)

        self._alone("ranks", call)
        return found

    def publications(self, timeout: float = 5.0) -> list[PublicationInfo]:
        """What every rank publishes: one for each rank and publication.

        Blocks at most *timeout* seconds. A rank that gave no answer until then is left out;
        :meth:`ranks` says which and why.

        Raises:
            StateError: no addresses.
            PullTimeoutError, CancelledError, ConnectionFailedError: as named.
        """
        found: list[PublicationInfo] = []
        self._look(
            "publications",
            self._library.fanin_client_list,
            (),
            timeout,
            _ffi.PublicationFn,
            lambda info: found.append(publication_info(info.contents)),
        )
        return found

    def catalog(
        self, run: str | int, name: str | None = None, timeout: float = 5.0, *, owners: bool = True
    ) -> list[Entry]:
        """The run's tensors in order of their names, with every rank's boxes.

        Waits for a first commit, at most *timeout* seconds.

        Args:
            name: this tensor only.
            owners: False: without the boxes, of which a large trainer has millions.

        Raises:
            NotFoundError: no such run or tensor.
            PullTimeoutError, CancelledError, ConnectionFailedError, PeerError: as named.
        """
        found: list[Entry] = []
        which = None if name is None else c_string(name, "the tensor's name")
        self._look(
            "catalog",
            self._library.fanin_client_catalog,
            (publication_of(run).encode(), which),
            timeout,
            _ffi.EntryFn,
            lambda address: found.append(entry_at(address, owners)),
        )
        return found

    def metadata(self, run: str | int, timeout: float = 5.0) -> dict[str, str]:
        """The run's metadata, as the trainer set it: of the first rank that answers.

        Blocks and raises as :meth:`catalog`.
        """
        found: dict[str, str] = {}

        def add(key: bytes, value: bytes) -> None:
            found[text(key)] = text(value)

        self._look(
            "metadata",
            self._library.fanin_client_metadata,
            (publication_of(run).encode(),),
            timeout,
            _ffi.PairFn,
            add,
        )
        return found

    def watch(
        self,
        run: str | int,
        callback: Callable[[WatchEvent], object],
        timeout: float = 60.0,
        *,
        quiet: Callable[[float, list[RankState]], object] | None = None,
        quiet_after: float = 5.0,
    ) -> None:
        """Calls *callback* for each step that all ranks have committed, until it returns False.

        The connections are given up at the end; the next call makes them anew.

        Args:
            callback: its result, if it is False, ends the watch; None goes on.
            timeout: seconds, for the whole call.
            quiet: called while nothing happens, with the seconds since all ranks have committed a
                step and what each of them is doing; False ends the watch, too.
            quiet_after: seconds without any call until *quiet* is called.

        Raises:
            PullTimeoutError: the time has passed.
            CancelledError, NotFoundError: as named.
            ConnectionFailedError: a rank was lost.
        """
        name, limit = publication_of(run).encode(), milliseconds(timeout, "timeout")
        every = milliseconds(quiet_after, "quiet_after")

        def silence(passed: int, ranks: Any, count: int) -> object:
            assert quiet is not None
            return quiet(passed / 1e3, [rank_state(ranks[index]) for index in range(count)])

        def call(use: Use, handle: ctypes.c_void_p) -> None:
            events = _ffi.WatchFn(
                _collect(use, lambda event: callback(watch_event(event.contents)))
            )
            if quiet is None:
                self._run(use, self._library.fanin_client_watch, handle, name, limit, events, None)
                return
            follow, states = self._library.fanin_client_follow, _ffi.QuietFn(_collect(use, silence))
            self._run(use, follow, handle, name, limit, events, every, states, None)

        self._alone("watch", call)

    def ping(self, timeout: float = 5.0) -> list[tuple[RankInfo, float]]:
        """Round trip times to the ranks, in seconds; each rank is judged by itself.

        Blocks at most *timeout* seconds and raises as :meth:`publications`.
        """
        found: list[tuple[RankInfo, float]] = []
        self._look(
            "ping",
            self._library.fanin_client_ping,
            (),
            timeout,
            _ffi.PingFn,
            lambda info, rtt: found.append((rank_info(info.contents), rtt / 1e9)),
        )
        return found

    def _look(
        self,
        name: str,
        function: Any,
        before: tuple[Any, ...],
        timeout: float,
        kind: Any,
        each: Callable[..., object],
    ) -> None:
        limit = milliseconds(timeout, "timeout")

        def call(use: Use, handle: ctypes.c_void_p) -> None:
            self._run(use, function, handle, *before, limit, kind(_collect(use, each)), None)

        self._alone(name, call)


def _collect(use: Use, each: Callable[..., object]) -> Callable[..., bool]:
    """A callback of the library that gives its arguments to *each*; False from it, or an
    exception, ends the call."""

    def one(_: Any, *arguments: Any) -> bool:
        try:
            return each(*arguments) is not False
        except BaseException as error:
            use.failure = error
            return False

    return one
