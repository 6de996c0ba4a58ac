# SPDX-License-Identifier: Apache-2.0
"""Tensors that are pulled into again and again, kept by the C library."""

from __future__ import annotations

import ctypes
from typing import Any

from ._library import check, new_error
from ._tensors import Described


class Prepared:
    """``fanin_destination``; ends with this object."""

    __slots__ = ("_as_parameter_", "_library")

    def __init__(self, library: Any, described: Described) -> None:
        self._library = library
        #: ctypes takes this object for it, so that a call holds what it was given.
        self._as_parameter_ = ctypes.c_void_p()
        error = new_error()
        status = library.fanin_destination_create(
            described.address, len(described), self._out(), ctypes.byref(error)
        )
        check(status, error)

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
