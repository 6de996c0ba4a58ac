# SPDX-License-Identifier: Apache-2.0
"""Adapter directories that were never finished."""

from __future__ import annotations

import ctypes
import os

from ._library import check, library, new_error
from .errors import RequestError


def sweep_adapter_directory(directory: str | os.PathLike[str]) -> int:
    """Removes what pulls into *directory* have left that were killed; how many adapters.

    These are this user's half-made adapters and lock files, if nobody holds the lock of that name.
    Pulls do it themselves in the directory that they write to. Removes nothing from filesystems
    that other hosts share. Waits for nobody, blocks as long as deleting takes; any thread.

    Raises:
        RequestError: other users may rename what lies there.
        HostError: it cannot be read.
    """
    path = os.fsencode(directory)
    if b"\0" in path:
        raise RequestError.make(f"the directory is {directory!r}, not a path")
    removed = ctypes.c_uint64()
    error = new_error()
    status = library().fanin_sweep_adapter_directory(
        path, ctypes.byref(removed), ctypes.byref(error)
    )
    check(status, error)
    return removed.value
