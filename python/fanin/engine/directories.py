# SPDX-License-Identifier: Apache-2.0
"""Where pulled adapters lie, and who still needs them.

``<root>/<world id>/<run>/<label>-step<step>`` holds one step's adapter. All engines of a host
that use one root share it: each holds a shared lock (``flock``) on ``.<name>.fanin-use`` beside
the directory from before the pull until the adapter is retired, and only who gets that lock for
itself alone deletes. The kernel drops the locks of a process that dies, so what it left behind
is found by :meth:`Places.sweep`. What could not be deleted, for want of descriptors say, is tried
again each time that the process gives up another directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from fanin.config import default_cache_dir
from fanin.errors import FaninError, HostError, PullTimeoutError

_USE = ".fanin-use"
_DEAD = ".fanin-dead"

_undeleted: deque[Path] = deque()  # given up by this process, and there still


def incarnations_in(path: Path) -> dict[str, str] | None:
    """Of the ranks that had the step of the directory at *path*; None: it does not say."""
    try:
        then = json.loads((path / "fanin.json").read_bytes())["incarnations"]
        return {str(rank): str(incarnation) for rank, incarnation in then.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # the pull looks at it


def _use_file(path: Path) -> Path:
    return path.parent / f".{path.name}{_USE}"


class Lease:
    """A directory that this process needs. Made by :meth:`Places.lease`; any thread."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def release(self, *, delete: bool) -> bool:
        """Gives the directory up. True: this call deleted it.

        delete: delete it, unless another process needs it; then that one will. Blocks as long as
        deleting takes. A second call does nothing. Raises HostError if it cannot be deleted now;
        what is left is deleted when another directory of this process is given up.
        """
        descriptor = self._take()
        if descriptor < 0:
            return False
        try:
            deleted = delete and _delete_if_alone(self.path, descriptor)
        except (OSError, HostError):
            _undeleted.append(self.path)
            raise
        finally:
            os.close(descriptor)
        _try_again()
        return deleted

    def postpone(self) -> None:
        """Gives the directory up, to be deleted as one that could not be. Does not block."""
        descriptor = self._take()
        if descriptor >= 0:
            _undeleted.append(self.path)
            os.close(descriptor)

    def _take(self) -> int:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        return descriptor


def _try_again() -> None:
    """Deletes what could not be before; the first that still cannot ends it until the next time."""
    for _ in range(len(_undeleted)):
        try:
            path = _undeleted.popleft()
        except IndexError:  # another thread is at it
            return
        try:
            _delete_unused(path)
        except FileNotFoundError:  # somebody has swept it up
            continue
        except (OSError, HostError):
            _undeleted.append(path)
            return


def _delete_unused(path: Path) -> bool:
    """Deletes a directory that nobody gave up, or not whole. False: a process needs it.

    Raises OSError, FileNotFoundError if no process has left it, and HostError.
    """
    use = _use_file(path)
    descriptor = os.open(use, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not _lock_shared(descriptor, use):
        return False
    try:
        return _delete_if_alone(path, descriptor)
    finally:
        os.close(descriptor)


def _delete_if_alone(path: Path, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    dead = path.parent / f".{path.name}{_DEAD}"
    try:
        # Gone at once under its name: nobody ever sees half of it.
        if dead.exists():
            shutil.rmtree(dead)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, dead)
            shutil.rmtree(dead)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_use_file(path))
    except OSError as error:
        raise HostError.make(
            f"{path} cannot be deleted: {error}",
            "it is tried again when another one is given up; if that fails, too, delete it by hand",
        ) from error
    _remove_empty(path.parent)
    return True


class Places:
    """The directories below one root. Any thread."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._lock = threading.Lock()
        self._used: dict[Path, int] = {}

    def choose(
        self,
        world: str,
        run: str,
        label: str,
        step: int,
        is_outlived: Callable[[Mapping[str, str]], bool] = lambda _: False,
    ) -> Path:
        """Where the adapter of this identity goes: a path that this process has not used yet.

        An engine's prefix cache knows adapters by their paths, so a step that is pulled again
        after it was retired goes to ``...-2``, ``...-3``. So does a step that is not that of the
        directory that is there, as *is_outlived* says of its ranks' incarnations: another engine
        may still read it. Blocks as *is_outlived* does.
        """
        base = self.root / world / _folder(run) / f"{_folder(label)}-step{step}"
        while True:
            with self._lock:
                times = self._used.get(base, 0)
            path = base if times == 0 else base.with_name(f"{base.name}-{times + 1}")
            then = incarnations_in(path)
            if then is None or not is_outlived(then):
                return path
            self.spend(path, world, run, label, step)

    def spend(self, path: Path, world: str, run: str, label: str, step: int) -> None:
        """Notes that *path*, which :meth:`choose` gave, has been used. Does not block."""
        base = self.root / world / _folder(run) / f"{_folder(label)}-step{step}"
        with self._lock:
            times = self._used.get(base, 0)
            current = base if times == 0 else base.with_name(f"{base.name}-{times + 1}")
            if current == path:
                self._used[base] = times + 1

    def lease(self, path: Path, deadline: float) -> Lease:
        """Makes the folders above *path* and keeps it from being deleted by others.

        Blocks while another process deletes it, until *deadline* (of time.monotonic). Raises
        HostError if a folder cannot be made or another user could write to it, PullTimeoutError.
        """
        while True:
            try:
                self._make_folders(path.parent)
                descriptor = os.open(
                    _use_file(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except FileNotFoundError:
                descriptor = -1  # a sweep has just removed the empty folder
            except OSError as error:
                raise HostError.make(
                    f"{path.parent} cannot be written: {error}", "set NIXL_LORA_CACHE_DIR"
                ) from error
            if descriptor >= 0 and _lock_shared(descriptor, _use_file(path)):
                return Lease(path, descriptor)
            if time.monotonic() >= deadline:
                raise PullTimeoutError.make(
                    f"{path} is being deleted by another process and is not gone in time",
                    "ask again",
                )
            time.sleep(0.01)

    def _make_folders(self, parent: Path) -> None:
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        _judge_root(self.root)
        for folder in (parent.parent, parent):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            if not _is_ours(folder):
                raise HostError.make(f"{folder} is not a directory of this user alone", "remove it")

    def sweep(self) -> list[Path]:
        """Deletes what processes that are gone have left below the root; what was deleted.

        Never blocks on another process and raises nothing: what cannot be deleted stays.
        """
        gone: list[Path] = []
        try:
            _judge_root(self.root)
        except (OSError, HostError):
            return gone
        for world in _own_folders(self.root):
            if len(world.name) == 32 and not world.name.strip("0123456789abcdef"):
                for run in _own_folders(world):
                    gone += _sweep_run(run)
        return gone


def _is_ours(folder: Path) -> bool:
    """Whether it is a directory, no link to one, in which this user alone can rename."""
    found = os.lstat(folder)
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not shared


def _own_folders(parent: Path) -> list[Path]:
    """The folders in *parent* that are ours; of others nothing is deleted, whatever they hold."""
    found = []
    with contextlib.suppress(OSError):
        for one in list(parent.iterdir()):
            with contextlib.suppress(OSError):  # it has gone meanwhile
                found += [one] if _is_ours(one) else []
    return found


def _sweep_run(folder: Path) -> list[Path]:
    """The same of one run's folder: half-made adapters first, which keep the folder from going."""
    # Not at import: it loads libfanin, and workers that never pull need none.
    from fanin import sweep_adapter_directory

    gone = []
    with contextlib.suppress(FaninError):
        sweep_adapter_directory(folder)
    for use in folder.glob(f".*{_USE}"):
        path = folder / use.name[1 : -len(_USE)]
        with contextlib.suppress(OSError, HostError):
            if _delete_unused(path):
                gone.append(path)
    _remove_empty(folder)
    return gone


def _remove_empty(folder: Path) -> None:
    """The run's folder and the world's, if there is nothing in them any more."""
    for one in (folder, folder.parent):
        with contextlib.suppress(OSError):
            os.rmdir(one)


def _judge_root(root: Path) -> None:
    """Raises HostError if another user could plant or exchange what lies in *root*.

    Everybody can make the default root before we do: it must be our own directory, closed to
    others. One that was configured may also be root's, and open to others if it is sticky.
    """
    default = root == default_cache_dir()
    found = os.lstat(root) if default else os.stat(root)
    user = os.geteuid()
    remedy = "or set NIXL_LORA_CACHE_DIR to a directory of your own"
    if default and not stat.S_ISDIR(found.st_mode):
        raise HostError.make(f"{root} is not a directory", f"remove it, {remedy}")
    if found.st_uid != user and (default or found.st_uid != 0):
        raise HostError.make(
            f"{root} belongs to uid {found.st_uid}, this process is uid {user}",
            f"let its owner remove it, {remedy}",
        )
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if default and found.st_mode & 0o077:
        raise HostError.make(
            f"{root} is open to other users (mode {stat.S_IMODE(found.st_mode):04o})",
            f"look at what lies there, chmod 700 {root}, {remedy}",
        )
    if shared and not found.st_mode & stat.S_ISVTX:
        raise HostError.make(
            f"other users may rename what lies in {root}", f"chmod go-w {root}, {remedy}"
        )


def _lock_shared(descriptor: int, file: Path) -> bool:
    """Takes the shared lock; False, and the descriptor closed, if the file is being deleted."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mine = os.fstat(descriptor)
        there = os.stat(file)
        if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
            return True
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
            os.close(descriptor)
            raise
    os.close(descriptor)
    return False


def _folder(text: str) -> str:
    """*text* as one component of a path."""
    plain = (c.isascii() and (c.isalnum() or c in "._-+=@") for c in text)
    safe = "".join(c if good else "_" for c, good in zip(text, plain, strict=True))[:120]
    return "_" + safe if not safe or safe.startswith(".") else safe
