# SPDX-License-Identifier: Apache-2.0
"""What the pulls and updates of this process did when, as a file for ui.perfetto.dev."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ._library import c_string, check, library, new_error
from .errors import RequestError


@contextmanager
def trace(file: str | os.PathLike[str]) -> Iterator[None]:
    """Writes a trace of what servers and clients of this process do inside the block.

    The file is made (mode 0600) and must not be there. It is Chrome's trace event format, for
    ui.perfetto.dev: a row a thread, and one a rank that it pulls from. One trace a process; without
    changing code, ``FANIN_TRACE=DIR`` in the environment gives each process a file of its own
    there.

    Raises:
        RequestError: no path, or the file is there.
        StateError: this process has a trace already.
        HostError: it cannot be made or written. An exception of the block goes before the error of
            an incomplete file.
    """
    if not isinstance(file, (str, os.PathLike)):
        raise RequestError.make(
            f"file is {type(file).__name__}, not a path", "give a str or a Path"
        )
    start, error = library().fanin_trace_start, new_error()
    check(start(c_string(os.fspath(file), "file"), ctypes.byref(error)), error)
    try:
        yield
    except BaseException:
        library().fanin_trace_stop(None)
        raise
    check(library().fanin_trace_stop(ctypes.byref(error)), error)
