# SPDX-License-Identifier: Apache-2.0
"""Finding, loading and checking the C library."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import fanin
import pytest
from fanin import _ffi, _library
from local_world import run_script


def test_a_library_that_is_not_there() -> None:
    done = run_script(
        "import os, fanin\n"
        "os.environ['FANIN_LIBRARY'] = '/nowhere/libfanin.so.0'\n"
        "server = lambda: fanin.Server(world_id='ab' * 16, rank=0, world_size=1)\n"
        "for make in (fanin.Client, server):\n"
        "    try:\n"
        "        make()\n"
        "    except fanin.HostError as error:\n"
        "        print(error.name, '/nowhere/libfanin.so.0' in str(error), bool(error.remedy))\n"
    )
    assert done.stdout == "FANIN_ERR_IO True True\n" * 2 and done.stderr == ""


def test_a_library_that_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANIN_LIBRARY", "libc.so.6")
    with pytest.raises(fanin.HostError, match="is not the library of fanin"):
        _library._load()


def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "__version__", "7.3.0")
    with pytest.raises(fanin.HostError, match="is version 0.*, and this package is 7.3.0"):
        _library._load()


def test_structures_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = ctypes.CDLL(_library.library()._name)  # without prototypes

    class Other(_ffi.Structure):
        _fields_ = _ffi.ServerConfig._fields_[:6] + _ffi.ServerConfig._fields_[7:]

    init = "fanin_server_config_init"
    monkeypatch.setattr(_library, "_DEFAULTS", [(init, Other, _library._DEFAULTS[0][2])])
    with pytest.raises(fanin.HostError, match="lays out Other.* in another way"):
        _library._check_layout(bare, "a path")


def test_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FANIN_LIBRARY", "/some/where.so")
    assert _library.library_path() == "/some/where.so"
    monkeypatch.delenv("FANIN_LIBRARY")
    monkeypatch.setattr(_library, "__file__", str(tmp_path / "_library.py"))
    assert _library.library_path() == _library.SONAME
    own = tmp_path / "lib" / _library.SONAME
    own.parent.mkdir()
    own.touch()
    assert _library.library_path() == str(own)


def test_a_wheel_of_ucx_is_offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(_library.os, "environ", environ)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    _library.offer_ucx()
    assert environ == {}  # the folder holds no library
    library = tmp_path / "lib" / "libucp.so.0"
    library.parent.mkdir()
    library.touch()
    _library.offer_ucx()
    assert environ == {"FANIN_UCX_LIBRARY": str(library)}
    environ["FANIN_UCX_LIBRARY"] = ""  # "none", which stays so
    _library.offer_ucx()
    assert environ == {"FANIN_UCX_LIBRARY": ""}
    environ.clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _library.offer_ucx()
    assert environ == {}
