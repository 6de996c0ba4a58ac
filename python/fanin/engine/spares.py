# SPDX-License-Identifier: Apache-2.0
"""When a pull into a directory has the next one's file made beforehand.

The file's pages are there when the next pull comes, which would wait for them otherwise. That is
memory of the adapter's size once more, so it is done for a run of which this client pulls one step
after the other, and only while there is plenty of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ADAPTERS = 3
"""So many adapters have to fit into what is free: the pull's own file, the spare one, one more."""


class Spares:
    """Which client pulled which run last, and how much that was. Any thread.

    wanted: False: no client ever keeps a spare file.
    """

    def __init__(self, wanted: bool = False) -> None:
        self.wanted = wanted
        self._lock = threading.Lock()
        self._last: weakref.WeakKeyDictionary[Any, tuple[Path, int]] = weakref.WeakKeyDictionary()

    def pulled(self, client: Any, folder: Path, size: int) -> None:
        """*client* has pulled an adapter of *size* bytes into a directory in *folder*."""
        with self._lock:
            self._last[client] = folder, size

    def knows(self, client: Any, folder: Path) -> bool:
        """Whether *client* pulled into *folder* last: its spare file, if it has one, is there."""
        with self._lock:
            return self._last.get(client, (None, 0))[0] == folder

    def may(self, client: Any, folder: Path) -> bool:
        """Whether *client* is to keep a spare file when it has pulled into *folder* again.

        Blocks for looking at files of the kernel's.
        """
        with self._lock:
            last, size = self._last.get(client, (None, 0))
        return self.wanted and last == folder and has_room(folder, _ADAPTERS * size)


def has_room(folder: Path, size: int) -> bool:
    """Whether *folder*'s file system and this process' memory have *size* bytes left."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= size and all(left >= size for left in memory_left())


def memory_left(root: Path = Path("/")) -> Iterator[int]:
    """Bytes that the host has available, and that this process' container may take, as far as they
    are told. A file that cannot be read sets no limit.

    Args:
        root: the folder of the kernel's files; the group is one of version 2, as a container sees
            its own.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError, IndexError):
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        # What the kernel keeps of files is given back when it is wanted.
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "active_file ")):
                left += int(line.split()[1])
        yield max(left, 0)
