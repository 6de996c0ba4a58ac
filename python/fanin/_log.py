# SPDX-License-Identifier: Apache-2.0
"""The C library's log lines in :mod:`logging`.

Lines of servers go to the logger ``fanin.server``, those of clients to ``fanin.client``; each
record has the line's ``event`` ("session-open") as an attribute, and its time. The library's
threads never wait for Python: they write into a ring, and one daemon thread for each of the two
loggers, started with the first server or client, reads it. A line that found the ring full is lost;
a warning with the event ``log-lost`` says in its place how many were.

Levels: ERROR, WARNING and INFO lines always get as far as the loggers, which decide as usual
(nothing below WARNING is shown unless logging is configured). DEBUG lines are made only if
``logging.getLogger("fanin")`` is effectively at DEBUG when the first server or client is created::

    logging.getLogger("fanin").setLevel(logging.DEBUG)

``FANIN_LOG=debug``, ``info`` or ``warn`` in the environment does so too, for the loggers below
``fanin``, and has their lines shown where no handler shows them; ``FANIN_LOG=info,FILE`` appends
them to a file. It is looked at with the first server or client, and says nothing where the program
has given the logger ``fanin`` a level or a handler.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
import traceback

from . import _ffi
from ._library import checked, library, text

_LINES = 2048  # of 1 KiB, for each of the two rings
_WAIT_MS = 3_600_000  # closing the ring ends the wait
_JOIN_SECONDS = 5.0

_LEVELS = {
    _ffi.LOG_ERROR: logging.ERROR,
    _ffi.LOG_WARNING: logging.WARNING,
    _ffi.LOG_INFO: logging.INFO,
    _ffi.LOG_DEBUG: logging.DEBUG,
}


class _Ring:
    """A ring of the library and the thread that reads it. Lives as long as the process."""

    def __init__(self, logger: logging.Logger) -> None:
        self._library = library()
        self._logger = logger
        level = logging.getLogger("fanin").getEffectiveLevel()
        handle = ctypes.c_void_p()
        least = _ffi.LOG_DEBUG if level <= logging.DEBUG else _ffi.LOG_INFO
        checked(self._library.fanin_log_ring_create, _LINES, least, ctypes.byref(handle))
        self.handle = handle
        self._thread = threading.Thread(target=self._drain, name=f"{logger.name}-log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread once it has read all lines. The ring stays: handles may hold it yet."""
        self._library.fanin_log_ring_close(self.handle)
        self._thread.join(_JOIN_SECONDS)

    def _drain(self) -> None:
        line = _ffi.LogLine()
        line.struct_size = ctypes.sizeof(line)
        while True:
            status = self._library.fanin_log_ring_read(self.handle, _WAIT_MS, ctypes.byref(line))
            if status == _ffi.OK:
                self._forward(line)
            elif status != _ffi.ERR_TIMEOUT:
                return

    def _forward(self, line: _ffi.LogLine) -> None:
        level = _LEVELS.get(line.level, logging.DEBUG)
        self._handle(level, text(line.event), text(line.message), line.time_ns)

    def _handle(self, level: int, event: str, message: str, time_ns: int) -> None:
        if not self._logger.isEnabledFor(level):
            return
        record = self._logger.makeRecord(
            self._logger.name, level, "libfanin", 0, message, (), None, extra={"event": event}
        )
        record.created = time_ns / 1e9
        record.msecs = time_ns // 1_000_000 % 1000
        try:
            self._logger.handle(record)
        except Exception:
            # A filter that raises must not end the log. Handlers' errors never get here.
            if logging.raiseExceptions:
                traceback.print_exc()


_FORMAT = "%(asctime)s.%(msecs)03dZ %(name)s[%(process)d] %(levelname)s %(event)s: %(message)s"


class _Formatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        record.__dict__.setdefault("event", record.funcName)
        return super().format(record)


def _follow_environment() -> None:
    """Sets the logger "fanin" up as FANIN_LOG says, unless the program has.

    Raises:
        RequestError: it says something else.
        HostError: the file cannot be written.
        ConnectionFailedError: it is another user's.
    """
    choice = os.environ.get("FANIN_LOG", "")
    logger = logging.getLogger("fanin")
    if not choice or logger.level != logging.NOTSET or logger.handlers:
        return
    level, descriptor = ctypes.c_int32(), ctypes.c_int32()
    where = ctypes.byref(level), ctypes.byref(descriptor)
    checked(library().fanin_log_choice, os.fsencode(choice), *where)
    handler: logging.Handler | None = None
    if descriptor.value >= 0:
        handler = logging.StreamHandler(os.fdopen(descriptor.value, "a", encoding="utf-8"))
    elif not logger.hasHandlers():
        handler = logging.StreamHandler()
    if handler:
        handler.setFormatter(_Formatter(_FORMAT, "%Y-%m-%dT%H:%M:%S"))
        logger.addHandler(handler)
    logger.setLevel(_LEVELS[level.value])


_lock = threading.Lock()
_rings: dict[str, _Ring] = {}


def _forget() -> None:
    # The threads stayed in the parent, whose rings these are; a lock may have been held.
    global _lock
    _lock = threading.Lock()
    _rings.clear()


os.register_at_fork(after_in_child=_forget)


def log_target(kind: str) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """Log function and cookie for the configuration of a *kind* ("server" or "client")."""
    with _lock:
        ring = _rings.get(kind)
        if ring is None:
            _follow_environment()
            ring = _rings[kind] = _Ring(logging.getLogger(f"fanin.{kind}"))
            atexit.register(_stop, ring)
    return ctypes.cast(library().fanin_log_ring_write, ctypes.c_void_p), ring.handle


def _stop(ring: _Ring) -> None:
    if ring in _rings.values():  # not in a forked child
        ring.stop()
