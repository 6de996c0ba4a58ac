# SPDX-License-Identifier: Apache-2.0
"""The structures and functions of fanin._ffi are those of the C headers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fanin import _dtypes, _ffi
from fanin._library import initialised, library

ROOT = Path(__file__).parents[2]
HEADERS = [
    ROOT / folder / "include/fanin"
    for folder in ("common/core", "common/trace", "client", "server", "relay")
]
COMMENT = re.compile(r"/\*.*?\*/|^#.*?(?<!\\)$", re.DOTALL | re.MULTILINE)
CODE = COMMENT.sub("", "\n".join(h.read_text() for d in HEADERS for h in sorted(d.glob("*.h"))))
ALIAS = {name: kind for kind, name in re.findall(r"typedef (\w+) (\w+);", CODE)}
NUMBERS = {
    "FANIN_DRAIN_BUCKETS": _ffi.DRAIN_BUCKETS,
    "FANIN_MAX_DIMS": _ffi.MAX_DIMS,
    "FANIN_WORLD_ID_SIZE": _ffi.WORLD_ID_SIZE,
}
FUNCTION_POINTERS = {
    name: (result, of)
    for result, name, of in re.findall(r"typedef (\w+) \*?\(\*(\w+)\)\(([^)]*)\)", CODE)
}
PLAIN: dict[str, Any] = {
    "void": None,
    "int": ctypes.c_int,
    "bool": ctypes.c_bool,
    "char": ctypes.c_char,
    "size_t": ctypes.c_size_t,
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
}


def c_name(of: type) -> str:
    """``fanin_rank_info`` for ``RankInfo``."""
    return "fanin" + re.sub(r"([A-Z])", r"_\1", of.__name__).lower()


OURS: list[type[ctypes.Structure]] = [
    value
    for value in vars(_ffi).values()
    if isinstance(value, type)
    and issubclass(value, ctypes.Structure)
    and value is not ctypes.Structure
]
BY_NAME = {c_name(one): one for one in OURS}
CALLBACKS = {name: value for name, value in vars(_ffi).items() if name.endswith("Fn")}


def type_of(name: str, pointer: bool) -> Any:
    if pointer or name in FUNCTION_POINTERS:
        return ctypes.c_void_p
    return BY_NAME.get(name) or PLAIN[ALIAS.get(name, name)]


def members(structure: str) -> Iterator[tuple[str, Any]]:
    """Names and types, as the header has them."""
    body = re.search(rf"typedef struct {structure} {{(.*?)}} {structure};", CODE, re.DOTALL)
    assert body is not None, f"no header has {structure}"
    for line in " ".join(body[1].split()).split(";")[:-1]:
        kind, names = re.fullmatch(r" ?(?:const )?(\w+) (.*)", line).groups()  # type: ignore[union-attr]
        for one in names.split(","):
            star, name, size = re.fullmatch(
                r" ?(\*?)(?:const \*)?(\w+)(?:\[(\w+)\])?", one
            ).groups()  # type: ignore[union-attr]
            found = type_of(kind, bool(star))
            yield name, found * int(NUMBERS.get(size, size)) if size else found


@pytest.mark.parametrize("ours", OURS, ids=c_name)
def test_structures(ours: type[ctypes.Structure]) -> None:
    theirs = type("Theirs", (ctypes.Structure,), {"_fields_": list(members(c_name(ours)))})

    def layout(structure: Any) -> list[tuple[str, int, int]]:
        names = [field[0] for field in structure._fields_]
        found = [getattr(structure, name) for name in names]
        return [(n, f.offset, f.size) for n, f in zip(names, found, strict=True)]

    assert layout(ours) == layout(theirs)
    assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)


def kind(of: Any) -> str:
    """What a call's convention depends on: an address, or a number's size and sign."""
    if of is None:
        return "void"
    if issubclass(of, (ctypes.c_char_p, ctypes.c_void_p, ctypes._Pointer, ctypes._CFuncPtr)):
        return "address"
    return f"{of.__name__} of {ctypes.sizeof(of)}"


def parameters(text: str) -> list[str]:
    found = []
    for one in [] if text.strip() == "void" else text.split(","):
        name, star = re.match(r"\s*(?:const )?(\w+)( (?:const )?\*)?", one).groups()  # type: ignore[union-attr]
        found.append(kind(type_of(name, star is not None)))
    return found


def test_functions() -> None:
    code = re.sub(r"\s+", " ", CODE.replace("FANIN_MUST_CHECK", ""))
    pattern = r"FANIN_API (?:const )?(\w+) (\*?)(\w+)\(([^()]*)\) ?;"
    there = {name: (c, bool(star), of) for c, star, name, of in re.findall(pattern, code)}
    for name, (result, arguments) in {**_ffi.PROTOTYPES, **_ffi.WITH_GIL}.items():
        c, pointer, of = there[name]
        assert (name, kind(result)) == (name, kind(type_of(c, pointer)))
        assert (name, [kind(one) for one in arguments]) == (name, parameters(of))


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(name: str) -> None:
    ours = CALLBACKS[name]
    snake = re.sub(r"([A-Z])", r"_\1", name.removesuffix("Fn")).lower()
    result, of = FUNCTION_POINTERS[f"fanin{snake}_fn"]
    assert kind(ours._restype_) == kind(type_of(result, False))
    assert [kind(one) for one in ours._argtypes_] == parameters(of)


# Programs of the first release have structures of these sizes, and go on to work.
FIRST = {
    "Error": 1512,
    "LogLine": 1048,
    "Tensor": 112,
    "ServerConfig": 104,
    "CommitOptions": 32,
    "ServerStats": 208,
    "ClientConfig": 96,
    "PullOptions": 104,
    "ResultInfo": 208,
    "RankInfo": 104,
    "PublicationInfo": 96,
    "Entry": 112,
    "WatchEvent": 40,
    "RankState": 48,
    "RankProgress": 48,
    "PullProgress": 48,
    "Objects": 80,
    "RelayConfig": 32,
    "RelayStats": 72,
}


def versioned() -> dict[str, type[ctypes.Structure]]:
    return {one.__name__: one for one in OURS if one._fields_[0][0] == "struct_size"}


def test_structures_only_grow() -> None:
    now = {name: ctypes.sizeof(one) for name, one in versioned().items()}
    assert {name: size for name, size in now.items() if size < FIRST[name]} == {}


def of_size(filled: ctypes.Structure, size: int) -> Any:
    """The structure as a program has it that knows *size* bytes of it."""
    memory = ctypes.create_string_buffer(b"\xa5" * size, size)
    ctypes.memmove(memory, ctypes.addressof(filled), min(size, ctypes.sizeof(filled)))
    ctypes.c_size_t.from_buffer(memory).value = size
    return ctypes.cast(memory, ctypes.POINTER(type(filled)))


@pytest.mark.parametrize("more", [-8, 0, 40])
def test_programs_of_other_releases(more: int) -> None:
    """A server, a commit and a client, with structures as they were at first, shorter, longer."""

    def sized(filled: ctypes.Structure, more: int = more) -> Any:
        return of_size(filled, FIRST[type(filled).__name__] + more)

    def good(status: int) -> None:
        assert status == 0, error.contents.message

    lib = library()
    server, client = ctypes.c_void_p(), ctypes.c_void_p()
    error = sized(_ffi.Error())
    config = initialised(_ffi.ServerConfig, lib.fanin_server_config_init)
    config.world_id[:] = b"\x05" * _ffi.WORLD_ID_SIZE
    good(lib.fanin_server_create(sized(config), ctypes.byref(server), error))
    tensor = _ffi.Tensor(name=b"nothing", dtype=_dtypes.DTYPES["F32"], n_dims=1)
    tensors = sized(tensor, max(more, 0))  # all of the first release's must be given
    good(lib.fanin_server_put(server, b"lora:0", tensors, 1, False, error))
    options = initialised(_ffi.CommitOptions, lib.fanin_commit_options_init)
    good(lib.fanin_server_commit(server, b"lora:0", 1, sized(options), error))
    config = initialised(_ffi.ClientConfig, lib.fanin_client_config_init)
    good(lib.fanin_client_create(sized(config), ctypes.byref(client), error))
    stats = sized(_ffi.ServerStats())
    assert lib.fanin_server_get_stats(server, stats) == 0
    assert stats.contents.publications == 1
    lib.fanin_client_destroy(ctypes.byref(client))
    lib.fanin_server_destroy(ctypes.byref(server), 0)
