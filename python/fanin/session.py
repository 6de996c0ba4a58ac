# SPDX-License-Identifier: Apache-2.0
"""Pulls of several reads, made by :meth:`fanin.Client.begin`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ._calls import Use
from ._exit import ClosableHandle
from ._records import PullResult, pull_result
from ._tensors import Described
from .errors import FaninError, RequestError, StateError

if TYPE_CHECKING:
    from .client import Client


_T = TypeVar("_T")


class PullSession(ClosableHandle):
    """A pull that fills memory in several calls, all of one step.

    Bytes that :meth:`read` has filled count only when :meth:`end` has returned. Until then they may
    be torn. In a ``with`` block a session that was not ended is abandoned::

        with client.begin("full:0", packed, at_least=7) as session:
            for layer in layers:
                session.read(layer.first, layer.count)
                install(layer)
            session.end()

    Until it is ended or abandoned, other calls of its client raise :class:`StateError`. But
    :meth:`Client.cancel` ends a read. And :meth:`Client.close` and :meth:`Client.disconnect`
    abandon the session. One thread at a time uses it, as the client.

    Between the calls nothing runs. The trainer's updates wait for a session as for any reader, at
    most their lease time; an update that comes later makes it stale.
    """

    _unclosed = "is not ended"

    def __init__(self, client: Client, packed: Described, kept: tuple[Any, ...]) -> None:
        self._pid = os.getpid()
        self._client = client
        self._packed = packed  # the memory that is written
        self._kept = kept  # what the library calls and looks at
        self._library = client._library
        self._handle: ctypes.c_void_p | None = None
        self._step = 0

    def _opened(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        self._step = int(self._library.fanin_session_step(handle))

    def __len__(self) -> int:
        """Tensors that it was begun with."""
        return len(self._packed)

    @property
    def step(self) -> int:
        """Of all that it reads."""
        return self._step

    @property
    def closed(self) -> bool:
        """Whether it was ended or abandoned."""
        return self._handle is None

    def _call(self, name: str, call: Callable[[Use, ctypes.c_void_p], _T]) -> _T:
        def one(use: Use, _: ctypes.c_void_p) -> _T:
            if self._handle is None:
                raise StateError.make("the session has ended", "begin another one")
            return call(use, self._handle)

        try:
            return self._client._alone(name, one)
        except FaninError:
            raise
        except BaseException:  # a callback's, or an interrupt: what was read is half-made
            self._abandon()
            raise

    def read(self, first: int = 0, count: int | None = None) -> None:
        """Fills the boxes of *count* tensors from number *first* on, in the order of packing.

        Any number of calls, in any order, also of tensors that were read before; what is not named
        is not written. A part that is read in each session alike is planned once.

        After what it raises, but for a wrong argument, the session has failed: :meth:`end` raises
        the same. An exception of *progress*, and KeyboardInterrupt, abandon it.

        Args:
            count: None: all that follow.

        Raises:
            RequestError: there are no such tensors; the session has ended (:class:`StateError`).
            StaleError: a rank has rewritten its weights; some paths find out only at the end.
            ConnectionFailedError: a rank that it needs is gone: it is not connected anew.
            PullTimeoutError: the session's time is over.
            CancelledError, HostError, PeerError: as of :meth:`Client.pull_into`.
        """
        total = len(self)
        if count is None and isinstance(first, int):
            count = max(0, total - first)
        for value in (first, count):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise RequestError.make(f"{value!r} is no number of a tensor, nor of tensors")
        assert count is not None
        if first + count > total:
            raise RequestError.make(
                f"tensors {first} to {first + count - 1} were asked for: the session has {total}"
            )
        self._call(
            "read",
            lambda use, handle: self._client._run(
                use, self._library.fanin_session_read, handle, first, count
            ),
        )

    def end(self) -> PullResult:
        """Ends it on all ranks: all that was read is of :attr:`step`, and may be used.

        After any exception the session has ended. Do not use anything that it read. *bytes* and
        *tensors* of the result count what was read, and again what was read again; *read* and other
        times are of all reads together, *total* is since :meth:`Client.begin` was called.

        Raises:
            StaleError: a rank has rewritten its weights meanwhile: begin again.
            StateError: it has ended already.
            FaninError: what a read has raised, or could.
        """
        result = ctypes.c_void_p()

        def call(use: Use, handle: ctypes.c_void_p) -> PullResult:
            try:
                self._client._run(
                    use, self._library.fanin_session_end, ctypes.byref(handle), ctypes.byref(result)
                )
                return pull_result(self._library, result)
            finally:
                self._library.fanin_result_free(ctypes.byref(result))
                self._handle = handle if handle else None

        return self._call("end", call)

    def abandon(self) -> None:
        """Gives up what was not ended; nothing that it has read may be used. Waits for nobody.

        Does nothing the second time, and in a forked child.
        """
        if self._pid != os.getpid() or self._handle is None:
            return
        if not self._client.closed:
            try:
                self._client._alone("abandon", lambda _, __: self._free())
            except StateError:
                if not self._client.closed:
                    raise
        self._free()  # without its client it touches nothing else

    def _free(self) -> None:
        handle = self._handle
        if handle is not None:
            self._library.fanin_session_abandon(ctypes.byref(handle))
            self._handle = None

    def close(self) -> None:
        """:meth:`abandon`."""
        self.abandon()

    def _abandon(self) -> None:
        try:
            self.abandon()
        except FaninError:  # a call of its client is under way: a collector comes at any time
            if self._handle is not None:
                self._client._forgotten.append(self._handle)
                self._handle = None

    def __repr__(self) -> str:
        return f"<fanin.PullSession of step {self._step}{', ended' if self.closed else ''}>"
