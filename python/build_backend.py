# SPDX-License-Identifier: Apache-2.0
"""Builds the package: meson-python, and what it leaves to us.

The C sources lie outside of this folder, where subprojects/fanin points; an sdist has copies of
them. The library is called through ctypes, so that a wheel fits any Python. UCX's headers are
those of the wheel libucx, if the build has it.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

try:
    import mesonpy
    from mesonpy import get_requires_for_build_sdist, get_requires_for_build_wheel
except ImportError as error:
    _project = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    _requires = re.findall(r"^requires = \[(.*)\]", _project, re.MULTILINE)[0].replace(",", "")
    raise SystemExit(
        f"fanin: {error}: without build isolation these must be installed: pip install {_requires}"
    ) from None

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

PACKAGE = [
    "LICENSE",
    "README.md",
    "build_backend.py",
    "examples",
    "fanin",
    "meson.build",
    "meson_options.txt",
    "pyproject.toml",
]
LIBRARY = [
    "client",
    "common",
    "fanin.map",
    "include",
    "meson.build",
    "meson_options.txt",
    "proto",
    "relay",
    "server",
    "tools",
]

# What a build runs: names, the variable that names another, what to do. Under build isolation pip
# brings all but the compiler.
ISOLATED = "without build isolation, pip install it into an environment that is activated"
PROGRAMS = [
    (("cc", "gcc", "clang"), "CC", "install a C compiler (Debian's package: build-essential)"),
    (("meson",), "MESON", ISOLATED),
    (("ninja", "ninja-build", "samu"), "NINJA", ISOLATED),
    (("patchelf",), "", ISOLATED),
]

Settings = dict[str, Any]


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    _need_programs()
    settings = dict(config_settings or {})
    given = settings.get("setup-args", [])
    settings["setup-args"] = [*_ucx_options(), *([given] if isinstance(given, str) else given)]
    with tempfile.TemporaryDirectory() as scratch:
        made = mesonpy.build_wheel(scratch, settings, metadata_directory)
        tagged = subprocess.run(
            [sys.executable, "-m", "wheel", "tags", "--python-tag=py3", "--abi-tag=none", made],
            cwd=scratch,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.split()[-1]
        shutil.move(os.path.join(scratch, tagged), os.path.join(wheel_directory, tagged))
    return tagged


def _need_programs() -> None:
    for names, variable, remedy in PROGRAMS:
        if not (os.environ.get(variable) or any(map(shutil.which, names))):
            raise SystemExit(f"fanin: no {names[0]} in PATH: {remedy}")


def build_editable(*_: object) -> str:
    raise SystemExit(
        "fanin is not installed in place, since it has a library to compile: pip install it "
        "without -e, after each change; or build the library (README.md) and run with "
        f"PYTHONPATH={HERE} and FANIN_LIBRARY=…/build/libfanin.so.0"
    )


def _ucx_options() -> list[str]:
    found = importlib.util.find_spec("libucx")
    folders = (found.submodule_search_locations or ()) if found else ()
    return [f"-Dfanin:ucx_root={folder}" for folder in folders]


def build_sdist(sdist_directory: str, config_settings: Settings | None = None) -> str:
    metadata = _metadata()
    base = f"{metadata.name}-{metadata.version}"
    with tarfile.open(
        os.path.join(sdist_directory, f"{base}.tar.gz"), "w:gz", dereference=True
    ) as archive:
        for folder, names in (HERE, PACKAGE), (HERE / "subprojects" / "fanin", LIBRARY):
            for name in names:
                archive.add(
                    folder / name,
                    f"{base}/{folder.relative_to(HERE) / name}",
                    filter=_without_traces,
                )
        info = bytes(metadata.as_rfc822())
        member = tarfile.TarInfo(f"{base}/PKG-INFO")
        member.size = len(info)
        archive.addfile(member, io.BytesIO(info))
    return f"{base}.tar.gz"


def _without_traces(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Nothing that tools left behind, and nothing of the user who packs."""
    name = os.path.basename(member.name)
    if name == "__pycache__" or name.startswith("."):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _metadata() -> Any:
    """What mesonpy would find out by configuring a build, which an sdist should not need."""
    import packaging.version
    import pyproject_metadata

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))
    metadata = pyproject_metadata.StandardMetadata.from_pyproject(project, HERE)
    for line in (HERE / "fanin" / "_library.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__ = "):
            metadata.version = packaging.version.Version(line.split('"')[1])
    return metadata
