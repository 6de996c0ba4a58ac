# SPDX-License-Identifier: Apache-2.0
"""Finds, loads and checks libfanin, once a process, when it is first needed.

It is looked for at ``FANIN_LIBRARY``, then in this package's own ``lib`` folder (where a wheel has
it), then where the dynamic loader looks. UCX is the library's own business, except that a wheel of
UCX is not where it looks: ``FANIN_UCX_LIBRARY`` is set to that one unless it is set already.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import _ffi
from ._dtypes import DTYPES, torch_dtype
from .errors import HostError, RequestError, error_class

__version__ = "0.1.0"

SONAME = "libfanin.so.0"

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


# Another thread may hold the lock while this one forks.
os.register_at_fork(after_in_child=_new_lock)


def library() -> ctypes.CDLL:
    """The library, loaded and checked. Any thread; blocks while it is loaded.

    Raises:
        HostError: it is not there, cannot be loaded, or is of another version.
    """
    global _library
    if _library is not None:
        return _library
    with _lock:
        if _library is None:
            offer_ucx()
            _library = _load()
    return _library


def library_path() -> str:
    """The file, or the name for the dynamic loader, that :func:`library` loads."""
    forced = os.environ.get("FANIN_LIBRARY")
    if forced:
        return forced
    own = Path(__file__).resolve().parent / "lib" / SONAME
    return str(own) if own.exists() else SONAME


def offer_ucx() -> None:
    if "FANIN_UCX_LIBRARY" in os.environ:
        return
    try:
        found = importlib.util.find_spec("libucx")
    except (ImportError, ValueError):
        return
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = os.path.join(folder, "lib", "libucp.so.0")
        if os.path.exists(file):
            os.environ["FANIN_UCX_LIBRARY"] = file
            return


def _load() -> ctypes.CDLL:
    path = library_path()
    remedy = f"install the wheel of fanin, or set FANIN_LIBRARY to the path of {SONAME}"
    try:
        found = ctypes.CDLL(path)
    except OSError as error:
        raise HostError.make(f"cannot load the C library '{path}': {error}", remedy) from error
    try:
        _ffi.apply(found)
    except AttributeError as error:
        raise HostError.make(
            f"'{path}' is not the library of fanin {__version__}: {error}", remedy
        ) from error
    version: str = found.fanin_version().decode()
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise HostError.make(
            f"'{path}' is version {version}, and this package is {__version__}", remedy
        )
    _check_layout(found, path)
    return found


# Defaults that the library is documented to fill in. Read through our structures, they show that
# both sides agree where the members are.
_SERVER = {"world_size": 1, "lease_ms": 1000, "max_sessions": 0, "idle_ms": 300000, "nice": 0}
_SERVER |= {"data_threads": 0, "peer_cpu": 50, "stranger_share_ms": 2000, "own_share_ms": 60000}
_CLIENT = {"lost_ms": 5000, "max_inflight": 64 << 20, "max_catalog": 256 << 20}
_DEFAULTS: list[tuple[str, type[ctypes.Structure], dict[str, int]]] = [
    ("fanin_server_config_init", _ffi.ServerConfig, _SERVER),
    ("fanin_client_config_init", _ffi.ClientConfig, _CLIENT),
    ("fanin_pull_options_init", _ffi.PullOptions, {"timeout_ms": 60000, "dtype": 0}),
    ("fanin_commit_options_init", _ffi.CommitOptions, {"flags": 0, "cast": 0}),
]


def _check_layout(found: ctypes.CDLL, path: str) -> None:
    for function, structure, defaults in _DEFAULTS:
        value = initialised(structure, getattr(found, function))
        wrong = [
            n
            for n, v in {"struct_size": ctypes.sizeof(structure), **defaults}.items()
            if getattr(value, n) != v
        ]
        if wrong:
            raise HostError.make(
                f"'{path}' lays out {structure.__name__}.{wrong[0]} in another way",
                "install package and library of one version",
            )


def initialised(structure: type[ctypes.Structure], init: Any) -> Any:
    """A new *structure*, filled by the library's *init* function."""
    value = structure()
    init(ctypes.byref(value), ctypes.sizeof(structure))
    return value


def new_error() -> _ffi.Error:
    """An empty description of a failure, for the library to fill."""
    error = _ffi.Error()
    error.struct_size = ctypes.sizeof(_ffi.Error)
    error.rank = -1
    return error


def text(value: bytes | None) -> str:
    """A string of the library's; what is not UTF-8 is replaced."""
    return value.decode("utf-8", "replace") if value else ""


def c_string(value: str, what: str) -> bytes:
    """UTF-8 for the library. :raises RequestError: it is no string, or has a NUL inside."""
    if not isinstance(value, str):
        raise RequestError.make(f"{what} is {type(value).__name__}, not str")
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise RequestError.make(f"{what} {value!r} is not UTF-8: {error}") from error
    if b"\0" in encoded:
        raise RequestError.make(f"{what} {value!r} contains a NUL character")
    return encoded


def milliseconds(seconds: float, what: str, *, zero: bool = False) -> int:
    """Whole milliseconds, at least 1 unless *zero* seconds are allowed and given.

    Raises:
        RequestError: not a number of seconds from 0 to some 49 days.
    """
    try:
        value = float(seconds)
    except (TypeError, ValueError):
        raise RequestError.make(f"{what} is {seconds!r}, not a number of seconds") from None
    if not 0 <= value <= 4294967 or (value == 0 and not zero):
        raise RequestError.make(
            f"{what} is {seconds!r}", "give seconds, above 0 and at most 4294967"
        )
    return max(1, round(value * 1000)) if value else 0


def integer(value: int, what: str, bits: int) -> int:
    """
    Raises:
        RequestError: *value* is not an integer from 0 to 2**bits - 1.
    """
    try:
        number = value.__index__()
    except AttributeError:
        raise RequestError.make(f"{what} is {value!r}, not an integer") from None
    if number < 0 or number >> bits:
        raise RequestError.make(f"{what} {number} is not from 0 to {(1 << bits) - 1}")
    return number


def dtype_code(name: object, what: str) -> int:
    """The library's number of a dtype: safetensors' name in any case, or a ``torch.dtype``.

    0 for None. :raises RequestError: there is no such dtype.
    """
    if name is None:
        return 0
    code = DTYPES.get(torch_dtype(name) or str(name).upper())
    if code is None:
        raise RequestError.make(
            f"{what} {name!r} is no dtype", f"the dtypes are {', '.join(DTYPES)}"
        )
    return code


def world_id_bytes(value: bytes | str) -> bytes:
    """The 16 bytes, not all zero, of a world id: as such or in hexadecimal digits."""
    try:
        raw = bytes.fromhex(value) if isinstance(value, str) else memoryview(value).tobytes()
    except (TypeError, ValueError):
        raw = b""
    if len(raw) != _ffi.WORLD_ID_SIZE:
        raise RequestError.make(
            f"the world id {value!r} is not {_ffi.WORLD_ID_SIZE} bytes",
            "draw os.urandom(16) on one rank and give it to all",
        )
    if not any(raw):
        raise RequestError.make(
            "the world id is all zero, which stands for none",
            "draw os.urandom(16) on one rank and give it to all; None takes any",
        )
    return raw


def check(status: int, error: _ffi.Error) -> None:
    """Raises what *status* and *error* describe, unless that is success."""
    if status == _ffi.OK:
        return
    message = text(error.message)
    if not message:
        message = text(library().fanin_status_text(status))
    raise error_class(status)(
        message,
        code=status,
        remedy=text(error.remedy),
        key=text(error.key),
        rank=error.rank if error.rank >= 0 else None,
        address=text(error.address),
        phase=text(error.phase),
        sys_errno=error.sys_errno,
        ucx_status=error.ucx_status,
    )


def checked(function: Any, *arguments: Any) -> None:
    """Calls a function of the library whose last argument is the error, and raises what it says."""
    error = new_error()
    check(function(*arguments, ctypes.byref(error)), error)


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
    checked(library().fanin_sweep_adapter_directory, path, ctypes.byref(removed))
    return removed.value


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
    checked(library().fanin_trace_start, c_string(os.fspath(file), "file"))
    try:
        yield
    except BaseException:
        library().fanin_trace_stop(None)
        raise
    checked(library().fanin_trace_stop)
