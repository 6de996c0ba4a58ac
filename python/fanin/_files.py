# SPDX-License-Identifier: Apache-2.0
"""JSON files that other processes read: they appear whole, and say nothing twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads``: of a field that is there twice readers would take one or the other."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the field {key!r} is there twice in one object")
        made[key] = value
    return made


def write_synced(path: Path, content: bytes) -> None:
    """A file that must not be there yet; on return its bytes are on disk."""
    with open(path, "xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """A file that readers see as it was, or whole: by rename, of bytes that are on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        write_synced(temporary, content)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
