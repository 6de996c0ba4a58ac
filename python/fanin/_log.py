# SPDX-License-Identifier: Apache-2.0
"""The C library's log lines in :mod:`logging`.

Lines of servers go to the logger ``fanin.server``, those of clients to ``fanin.client``; each
record has the line's ``event`` ("session-open") as an attribute, and its time. The library's
threads never wait for Python: they write into a ring, and one daemon thread for each of the two
loggers, started with the first server or client, reads it. A line that found the ring full is lost;
how many were is logged as a warning with the event ``log-lost``.

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
import stat
import threading
import time
import traceback

from . import _ffi
from ._library import check, library, new_error, text
from .errors import HostError, RequestError

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
        handle, error = ctypes.c_void_p(), new_error()
        check(
            self._library.fanin_log_ring_create(
                _LINES,
                _ffi.LOG_DEBUG if level <= logging.DEBUG else _ffi.LOG_INFO,
                ctypes.byref(handle),
                ctypes.byref(error),
            ),
            error,
        )
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
        if line.lost:
            self._handle(
                logging.WARNING,
                "log-lost",
                f"{line.lost} log lines were lost: they came faster than they were handled",
                line.time_ns,
            )
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


_CHOICES = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING}
_FORMAT = "%(asctime)s.%(msecs)03dZ %(name)s[%(process)d] %(levelname)s %(event)s: %(message)s"


def _open_own(file: str) -> int:
    """A file or pipe to append to, which is no link's and no other user's."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    except (OSError, ValueError) as error:
        raise HostError.make(
            f"cannot append to FANIN_LOG's file {file}: {error}",
            "let FANIN_LOG name a file that can be written",
        ) from error
    there = os.fstat(descriptor)
    if not stat.S_ISCHR(there.st_mode) and there.st_uid not in (0, os.geteuid()):
        os.close(descriptor)
        raise HostError.make(
            f"FANIN_LOG's file {file} belongs to another user",
            "let FANIN_LOG name a file of this user",
        )
    return descriptor


class _Formatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        record.__dict__.setdefault("event", record.funcName)
        return super().format(record)


def _follow_environment() -> None:
    """Sets the logger "fanin" up as FANIN_LOG says, unless the program has.

    :raises RequestError: it says something else.
    :raises HostError: the file cannot be written, or is another user's.
    """
    choice = os.environ.get("FANIN_LOG", "")
    logger = logging.getLogger("fanin")
    if not choice or logger.level != logging.NOTSET or logger.handlers:
        return
    level, comma, file = choice.partition(",")
    if level not in _CHOICES or (comma and not file):
        raise RequestError.make(
            f"FANIN_LOG={choice} is not debug, info or warn, with or without a file after a comma",
            "set it to debug, info or warn, or to such as info,FILE; or unset it",
        )
    handler: logging.Handler | None = None
    if file:
        handler = logging.StreamHandler(os.fdopen(_open_own(file), "a", encoding="utf-8"))
    elif not logger.hasHandlers():
        handler = logging.StreamHandler()
    if handler:
        handler.setFormatter(_Formatter(_FORMAT, "%Y-%m-%dT%H:%M:%S"))
        logger.addHandler(handler)
    logger.setLevel(_CHOICES[level])


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
