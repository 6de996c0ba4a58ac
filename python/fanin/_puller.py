# SPDX-License-Identifier: Apache-2.0
"""What pulls have in common: one call at a time, its options, its interrupts and its end."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from . import _ffi
from ._calls import Use, by_helper
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
)
from ._named import Named
from ._otel import Span, span
from ._records import PullProgress, PullResult, pull_progress, pull_result
from ._tensors import Described, PackedTensors, Shard, pack, shard_of
from .errors import CancelledError, ProcessError, RequestError, StateError
from .server import Stream, c_stream, publication_of

_T = TypeVar("_T")
# Of a pull: progress and rank_progress.
Listeners = tuple[Callable[[int, int], None] | None, Callable[[PullProgress], None] | None]
Report = Callable[[Callable[[], None]], None]

_PHASES = "connect catalog plan wait begin read scatter end write verify apply".split()
# A cancelled call ends within moments; only a file system that hangs takes longer.
_CLOSE_SECONDS = 10.0


def set_max_bytes(options: _ffi.PullOptions, max_bytes: int | None) -> None:
    if max_bytes is None:
        return
    options.max_bytes = integer(max_bytes, "max_bytes", 64)
    if max_bytes == 0:
        raise RequestError.make("max_bytes is 0: nothing could be pulled", "leave it out")


def c_addresses(addresses: Sequence[str]) -> Any:
    """As an array for the library. RequestError: they are none, or malformed."""
    if isinstance(addresses, (str, bytes)):
        raise RequestError.make(
            f"the addresses are one string, {addresses!r}", 'give a list: ["host:port", ...]'
        )
    raw = [c_string(address, "an address") for address in addresses]
    return (ctypes.c_char_p * len(raw))(*raw)


def _span_of(name: str, options: _ffi.PullOptions) -> Span:
    """OpenTelemetry's of one pull; name: of the method."""
    publication = options.publication.decode(errors="replace")
    exact = options.rule == _ffi.STEP_EXACT
    return span(
        "fanin.pull",
        call=name,
        publication=publication,
        run=publication.partition(":")[2],
        step=options.step if exact else None,
    )


def _tell_span(told: Span, result: PullResult, asked: bool) -> None:
    """asked: for deltas."""
    if not told.recording:
        return
    told.set(step=result.step, world=result.world_id, bytes=result.bytes, tensors=result.tensors)
    told.set(ranks=len(result.ranks), path=result.path, reused=result.reused)
    told.set(restarts=result.restarts, stale=result.stale)
    if asked and not result.reused:
        told.set(base_step=result.base_step, patch_bytes=result.patch_bytes)
    told.set(**{f"{phase}_ms": 1e3 * getattr(result, phase) for phase in _PHASES})


class Puller(ClosableHandle):
    """A handle of the library that pulls, one call at a time. A subclass makes the handle."""

    _kind: str
    """What it is, for humans and in the names of the library's functions."""

    def __init__(self) -> None:
        self._handle: ctypes.c_void_p | None = None
        self._pid = os.getpid()
        self._library = library()

        # At most one call, under "use". What enters a call there and takes it out is never the
        # main thread, where a signal may come between; only close() is, which stays there.
        self._uses: dict[str, Use] = {}
        self._closing = Use("close")
        # Held where the handle is used outside of a call, and where it is taken away. A signal
        # handler may cancel while the thread it interrupts holds it.
        self._handle_lock = threading.RLock()
        self._left_cancelled = False
        # Sessions that were forgotten while a call was under way: the next call lets go of them.
        self._forgotten: list[ctypes.c_void_p] = []
        self._named = Named(self._library)

    def _made(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        _open.add(self)

    def _require_process(self) -> None:
        if self._pid != os.getpid():
            raise ProcessError.make(
                f"the {self._kind} belongs to the parent process {self._pid}",
                f"create a {self._kind} of its own in the child",
            )

    def _require(self) -> ctypes.c_void_p:
        """The handle, outside of a call. Its lock is held."""
        self._require_process()
        if self._handle is None:
            raise StateError.make(f"the {self._kind} is closed")
        return self._handle

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"fanin_{self._kind}_{name}")

    def cancel(self) -> None:
        """Makes the call that is under way raise :class:`CancelledError` soon.

        If none is, the next one does. Any thread, also from a signal handler and a callback. Does
        nothing once this is closed, and in a forked child.
        """
        if self._pid != os.getpid():
            return
        with self._handle_lock:
            self._left_cancelled = False  # from here on it is somebody's wish
            if self._handle is not None:
                self._function("cancel")(self._handle)

    def _packed(
        self, tensors: Mapping[str, Any] | Iterable[Shard] | PackedTensors
    ) -> tuple[Described, list[Any] | None]:
        """Tensors as the C library takes them, and what their memory must be kept by besides."""
        memory: list[Any] | None = None
        packed: Described | None = None
        if isinstance(tensors, PackedTensors):
            packed = tensors
        elif isinstance(tensors, Mapping):
            held = self._named.hold(list(tensors), list(tensors.values()))
            if held is not None:
                packed, memory = held
            else:
                packed = pack(shard_of(n, value, writable=True) for n, value in tensors.items())
        else:
            packed = pack(tensors)
        if not packed:
            raise RequestError.make("no tensor is asked for", "name at least one tensor")
        return packed, memory

    def _into(
        self, packed: Described, _memory: object, first: Any, again: Any, at_once: bool = False
    ) -> tuple[Any, ...]:
        """The function that fills *packed*, and what it is given. *_memory*: kept meanwhile.
        *at_once*: by *again*, the first time too."""
        prepared = prepare(self._library, packed, at_once=at_once)
        return (first, packed.address, len(packed)) if prepared is None else (again, prepared)

    def _options(
        self,
        run: str | int,
        step: int | None,
        at_least: int | None,
        timeout: float,
        max_attempts: int,
        dtype: str | None,
        stream: Stream | None,
    ) -> _ffi.PullOptions:
        options: _ffi.PullOptions = initialised(
            _ffi.PullOptions, self._library.fanin_pull_options_init
        )
        options.publication = publication_of(run).encode()
        if step is not None and at_least is not None:
            raise RequestError.make("step and at_least are both given", "give one of them")
        if step is not None:
            options.rule, options.step = _ffi.STEP_EXACT, integer(step, "step", 64)
        elif at_least is not None:
            options.rule, options.step = _ffi.STEP_AT_LEAST, integer(at_least, "at_least", 64)
        options.timeout_ms = milliseconds(timeout, "timeout")
        options.max_attempts = integer(max_attempts, "max_attempts", 32)
        options.dtype = dtype_code(dtype, "dtype")
        options.stream = c_stream(stream)
        return options

    def _filling(
        self,
        run: str | int,
        tensors: Mapping[str, Any] | Iterable[Shard] | PackedTensors,
        step: int | None,
        at_least: int | None,
        timeout: float,
        max_attempts: int,
        dtype: str | None,
        stream: Stream | None,
        max_bytes: int | None,
        verify: bool,
    ) -> tuple[Described, list[Any] | None, _ffi.PullOptions]:
        """Of a pull into memory: as :meth:`_packed`, and the options."""
        packed, memory = self._packed(tensors)
        stream = current_stream(packed.cuda_devices) if stream is None else stream
        options = self._options(run, step, at_least, timeout, max_attempts, dtype, stream)
        set_max_bytes(options, max_bytes)
        options.verify = verify
        return packed, memory, options

    def _pull(
        self,
        name: str,
        options: _ffi.PullOptions,
        listeners: Listeners,
        into: Callable[[], tuple[Any, ...]],
    ) -> PullResult:
        """into: tells the library's function, and its arguments, when the call is under way."""
        result = ctypes.c_void_p()

        def call(use: Use, handle: ctypes.c_void_p) -> PullResult:
            function, *arguments = into()
            self._tell(options, lambda tell: self._report(use, tell), *listeners)
            try:
                self._run(
                    use, function, handle, ctypes.byref(options), *arguments, ctypes.byref(result)
                )
                return pull_result(self._library, result)
            finally:
                self._library.fanin_result_free(ctypes.byref(result))

        with _span_of(name, options) as told:
            done = self._alone(name, call)
            _tell_span(told, done, bool(options.deltas or options.delta_from))
            return done

    def _tell(
        self,
        options: _ffi.PullOptions,
        report: Report,
        progress: Callable[[int, int], None] | None,
        rank_progress: Callable[[PullProgress], None] | None,
    ) -> None:
        lib = self._library
        if progress is not None:
            options.progress = _ffi.ProgressFn(
                lambda _, done, total: report(lambda: progress(done, total))
            )
        if rank_progress is not None:
            options.rank_progress = _ffi.RankProgressFn(
                lambda _, told: report(lambda: rank_progress(pull_progress(lib, told.contents)))
            )

    def _report(self, use: Use, tell: Callable[[], None]) -> None:
        if use.failure is not None:
            return
        try:
            tell()
        except BaseException as error:
            use.failure = error
            self._cancel_own(use)

    # ------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """Cancels a call that is under way in another thread, closes everything and frees.

        Does nothing the second time, and in a forked child.

        Raises:
            StateError: called by a callback, or the other thread's call does not end.
        """
        if self._pid != os.getpid():
            return
        limit = time.monotonic() + _CLOSE_SECONDS
        while (other := self._uses.setdefault("use", self._closing)) is not self._closing:
            if threading.get_ident() in other.threads:
                raise StateError.make(
                    f"the {self._kind} is closed inside its own {other}", "close it afterwards"
                )
            self.cancel()
            if not other.done.wait(max(0.0, limit - time.monotonic())):
                raise StateError.make(f"the {self._kind}'s {other} does not end")
        self._destroy()

    def _let_go(self) -> None:
        while self._forgotten:
            self._library.fanin_session_abandon(ctypes.byref(self._forgotten[0]))
            self._forgotten.pop(0)

    def _destroy(self) -> None:
        # In an order in which a close() that was interrupted can be made again.
        with self._handle_lock:
            handle = self._handle
            if handle is not None:
                self._let_go()
                self._function("destroy")(ctypes.byref(handle))
                self._handle = None
                _open.discard(self)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._handle is None

    def _abandon(self) -> None:
        self._destroy()

    def __repr__(self) -> str:
        return f"<fanin.{type(self).__name__}{', closed' if self.closed else ''}>"

    # ------------------------------------------------------------------------------ calls

    def _alone(self, name: str, call: Callable[[Use, ctypes.c_void_p], _T]) -> _T:
        """Calls with the handle, if no other call is under way; for the main thread in a helper."""
        self._require_process()
        use = Use(name)
        # No helper runs any more while the interpreter ends.
        if threading.get_ident() != threading.main_thread().ident or sys.is_finalizing():
            return self._enter(use, call)
        return by_helper(lambda: self._enter(use, call), lambda: self._cancel_own(use))

    def _enter(self, use: Use, call: Callable[[Use, ctypes.c_void_p], _T]) -> _T:
        use.threads.add(threading.get_ident())
        other = self._uses.setdefault("use", use)
        if other is self._closing:
            raise StateError.make(f"the {self._kind} is closed")
        if other is not use:
            raise StateError.make(
                f"{use} is called while the {self._kind}'s {other} is under way",
                f"use a {self._kind} by one thread at a time",
            )
        try:
            handle = self._handle
            if handle is None:
                raise StateError.make(f"the {self._kind} is closed")
            if use.cancelled:
                raise CancelledError.make("the call was interrupted")
            self._let_go()
            return call(use, handle)
        finally:
            del self._uses["use"]
            use.done.set()

    def _call(self, name: str, function: Any, *arguments: Any) -> None:
        self._alone(name, lambda use, handle: self._run(use, function, handle, *arguments))

    def _run(self, use: Use, function: Any, *arguments: Any) -> None:
        """Makes a blocking call of the library, and raises what comes of it."""
        error = new_error()
        status = function(*arguments, ctypes.byref(error))
        if status == _ffi.ERR_CANCELLED and self._left_cancelled and not use.cancelled:
            # Not every cancel finds a call that it ends. One of our own that came too late for
            # the call before is not to end this one.
            self._left_cancelled = False
            status = function(*arguments, ctypes.byref(error))
        finish(use, status, error)

    def _cancel_own(self, use: Use) -> None:
        """As cancel(), of this call only and for a reason of its own. Also before it has begun."""
        use.cancelled = True
        with self._handle_lock:
            if self._uses.get("use") is use and self._handle is not None:
                self._left_cancelled = True
                self._function("cancel")(self._handle)


def current_stream(devices: Sequence[int]) -> Stream | None:
    """PyTorch's current stream on the first of *devices*; waits for those of the others.

    Its allocator gives out memory in the order of that stream: what lay there before may be read
    or written by work that is still on it.
    """
    torch = sys.modules.get("torch")
    if not devices or torch is None or not torch.cuda.is_initialized():
        return None
    first, *others = map(torch.cuda.current_stream, devices)
    for other in others:
        other.synchronize()
    return Stream(first.cuda_stream, first.device_index)


def finish(use: Use, status: int, error: _ffi.Error) -> None:
    if use.failure is not None:
        raise use.failure
    check(status, error)


_open: OpenHandles[Puller] = OpenHandles(Puller.close)


# ----------------------------------------------------- tensors that are pulled into again and again


class Prepared:
    """``fanin_destination``; ends with this object."""

    __slots__ = ("_as_parameter_", "_library")

    def __init__(self, library: Any, described: Described) -> None:
        self._library = library
        #: ctypes takes this object for it, so that a call holds what it was given.
        self._as_parameter_ = ctypes.c_void_p()
        create = library.fanin_destination_create
        checked(create, described.address, len(described), self._out())

    def touched(self) -> None:
        """Something else has written the memory: what it holds is no step's any more."""
        self._library.fanin_destination_touched(self)

    def __del__(self) -> None:
        self._library.fanin_destination_free(self._out())

    def _out(self) -> Any:
        return ctypes.byref(self._as_parameter_)


def prepare(library: Any, described: Described, *, at_once: bool = False) -> Prepared | None:
    """For a pull. None the first time, unless *at_once*: a client that pulls once does not pay for
    others.

    Only in the call that the client makes: what is let go for it, another one could be reading.
    """
    known: Prepared | None = described.prepared
    if known is None and (described.used or at_once):
        known = described.prepared = Prepared(library, described)
        described.is_prepared()
    described.used = True
    return known
