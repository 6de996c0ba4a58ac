# SPDX-License-Identifier: Apache-2.0
"""``nixl_info.json``: where the ranks of a trainer listen, and the marker ``STABLE`` beside it.

The trainer writes the file into the directory of a step, then the marker; the orchestrator waits
for the marker and hands the addresses to the engines. ``nixl-fetch`` reads and writes the same
file. Two forms are read::

    {"host": "10.0.0.1", "base_port": 6000, "world_size": 8}
    {"hosts": [{"host": "10.0.0.1", "base_port": 6000, "ranks": [0, 1, 2, 3]},
               {"host": "10.0.0.2", "base_port": 7000, "ranks": 4}]}

Rank r listens on ``base_port + r`` of its host. ``ranks`` is a list of ranks or how many follow
those before. ``run_idx`` (number or text), ``publications`` (``["lora:0", "full:0"]``),
``world_id`` (32 hex digits), ``server_name``, ``world_size``, ``step`` and ``secret_file`` (the
absolute path of the launch's secret, never the secret) may be there; fields that are unknown and
publications of unknown kinds are ignored.
"""

from __future__ import annotations

import ipaddress
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fanin._files import unique_fields, write_synced, write_whole
from fanin.errors import FaninError, HostError, NotFoundError, PullTimeoutError, RequestError
from fanin.names import MAX_STEP, check_run

__all__ = [
    "INFO_NAME",
    "MARKER_NAME",
    "Target",
    "TrainerInfo",
    "addresses_of",
    "is_loopback",
    "is_numeric",
    "is_path",
    "join_address",
    "read_info",
    "client_arguments",
    "secret_arguments",
    "secret_here",
    "split_address",
    "wait_stable",
    "write_info",
]

INFO_NAME = "nixl_info.json"
MARKER_NAME = "STABLE"
MAX_RANKS = 65536
_MAX_FILE = 32 << 20
_FORMS = "give HOST:PORT[,HOST:PORT...], a list of addresses, or the path of a nixl_info.json"

Target: TypeAlias = "str | os.PathLike[str] | TrainerInfo | Iterable[str | Sequence[Any]]"
"""What names a trainer: a path, ``"host:port,host:port"``, a list of ``"host:port"`` or of
``[host, port]``, or a TrainerInfo."""


# ------------------------------------------------------------------ addresses


def split_address(address: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[v6]:port"`` as (host without brackets, port).

    Does not block; any thread. Raises RequestError if it is neither.
    """
    host, colon, port = address.rpartition(":")
    bracketed = len(host) > 2 and host[0] == "[" and host[-1] == "]"
    if bracketed:
        host = host[1:-1]
    good = bool(colon) and 1 <= len(port) <= 5 and port.isascii() and port.isdigit()
    if not good or not _good_host(host, bracketed) or not 1 <= int(port) <= 65535:
        raise RequestError.make(f"{address!r} is no HOST:PORT", _FORMS, address=address[:63])
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """``host`` and ``port`` as one text, an IPv6 host in brackets.

    Does not block; any thread. Raises RequestError for a malformed host or a port that is not
    1 to 65535.
    """
    bare = host[1:-1] if len(host) > 2 and host[0] == "[" and host[-1] == "]" else host
    if not _good_host(bare, ":" in bare) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise RequestError.make(f"host {host!r} and port {port!r} make no address", _FORMS)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def is_numeric(host: str) -> bool:
    """Whether *host* is an address, not a name. Does not block."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether others cannot reach *host*: 127.x, ::1, localhost. Does not block."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return is_numeric(host) and ipaddress.ip_address(host).is_loopback


def _good_host(host: str, may_be_v6: bool) -> bool:
    forbidden = "/,[]" if may_be_v6 else "/,[]:"
    return bool(host) and not any(c in forbidden or c <= " " or c == "\x7f" for c in host)


def is_path(text: str) -> bool:
    """Whether *text* is meant as a path: it holds a ``/``, ends in ``.json`` or has no ``:``."""
    return "/" in text or text.endswith(".json") or ":" not in text


def path_of(target: Target) -> str | None:
    """The absolute path, if *target* is one; None: addresses. Does not block."""
    if isinstance(target, os.PathLike) or (isinstance(target, str) and target and is_path(target)):
        return os.path.abspath(target)
    return None


def addresses_of(target: Target) -> tuple[str, ...]:
    """The addresses of *target*, ``"host:port"`` or ``"[v6]:port"``, one a rank, rank by rank.

    Blocks as long as reading the file takes, and does not wait for it; any thread.

    Args:
        target: a nixl_info.json or the directory that holds one: a pathlib.Path, or a text with a
            ``/``, ending in ``.json`` or without a ``:``. Or ``"host:port,host:port"``, a list of
            ``"host:port"`` or of ``[host, port]`` pairs. Or a TrainerInfo.

    Raises:
        RequestError: *target* is not understood.
        NotFoundError: the file is missing.
        HostError: the file cannot be read.
    """
    if isinstance(target, TrainerInfo):
        return target.addresses
    if isinstance(target, os.PathLike):
        return read_info(target).addresses
    if isinstance(target, str):
        if not target.strip():
            raise RequestError.make("the trainer's address is empty", _FORMS)
        if is_path(target):
            return read_info(target).addresses
        return _unique(_one_address(part.strip()) for part in target.split(","))
    if isinstance(target, (bytes, bytearray, dict)) or not isinstance(target, Iterable):
        raise RequestError.make(f"a {type(target).__name__} is no trainer's address", _FORMS)
    return _unique(_one_address(item) for item in target)


def _one_address(item: Any) -> str:
    if isinstance(item, str):
        return join_address(*split_address(item))
    if isinstance(item, (list, tuple)) and len(item) == 2:
        host, port = item
        if isinstance(port, str) and port.isascii() and port.isdigit() and len(port) <= 5:
            port = int(port)
        if isinstance(host, str) and isinstance(port, int):
            return join_address(host, port)
    raise RequestError.make(f"{item!r} is no address of a rank", _FORMS)


def _unique(addresses: Iterable[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    for address in addresses:
        if address in seen:
            raise RequestError.make(
                f"{address} is given for rank {seen[address]} and for rank {len(seen)}",
                "name every rank once",
                address=address,
            )
        if len(seen) == MAX_RANKS:
            raise RequestError.make(f"more than {MAX_RANKS} addresses", _FORMS)
        seen[address] = len(seen)
    if not seen:
        raise RequestError.make("no address of a trainer rank is given", _FORMS)
    return tuple(seen)


# ----------------------------------------------------------------- the object


@dataclass(frozen=True, slots=True)
class TrainerInfo:
    """What nixl_info.json says of a trainer. Immutable.

    Raises RequestError for malformed values.

    Args:
        addresses: ``"host:port"`` or ``"[v6]:port"`` of rank 0, 1, ...; at least one, all
            different.
        world_id: 32 hex digits of this launch, None: unknown.
        run: the run that is meant, None: not said.
        server_name: the job's name, None: not said.
        step: the step that was committed when the file was written, None: not said.
        publications: all that is published, ``"lora:<run>"`` or ``"full:<run>"``; empty: not said.
        secret_file: absolute path of the launch's secret on each host, None: not said.
    """

    addresses: tuple[str, ...]
    world_id: str | None = None
    run: str | None = None
    server_name: str | None = None
    step: int | None = None
    publications: tuple[str, ...] = ()
    secret_file: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "addresses", _unique(map(_one_address, self.addresses)))
        for name, check in _CHECKS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check(value))

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return len(self.addresses)

    def to_json(self) -> dict[str, Any]:
        """The object of nixl_info.json, in the short form if the addresses allow it.

        Raises RequestError if a rank's port is below its number: the file's form, in which rank
        r listens on ``base_port + r``, cannot say that.
        """
        run, step = self.run or "", self.step
        number = run.isdigit() and str(int(run)) == run and len(run) < 18
        result: dict[str, Any] = {
            "run_idx": int(run) if number else self.run,
            "publications": list(self.publications) or None,
            "world_size": self.world_size,
            "world_id": self.world_id,
            "server_name": self.server_name,
            # JSON readers in C take integers of 63 bits.
            "step": step if step is None or step < 2**63 else str(step),
            "secret_file": self.secret_file,
        }
        hosts = self._hosts()
        if len(hosts) == 1 and hosts[0]["base_port"] > 0:
            result |= {name: hosts[0][name] for name in ("host", "base_port")}
        else:
            result["hosts"] = hosts
        return {name: value for name, value in result.items() if value is not None}

    def _hosts(self) -> list[dict[str, Any]]:
        hosts: dict[tuple[str, int], dict[str, Any]] = {}
        for rank, address in enumerate(self.addresses):
            host, port = split_address(address)
            if port < rank:
                raise RequestError.make(
                    f"rank {rank} listens on port {port}, and {INFO_NAME} cannot say ports below"
                    " the rank's number",
                    "give the ranks larger ports",
                    rank=rank,
                    address=address,
                )
            entry = {"host": host, "base_port": port - rank, "ranks": []}
            hosts.setdefault((host, port - rank), entry)["ranks"].append(rank)
        return list(hosts.values())


_KINDS = ("lora", "full")


def _publications(names: Iterable[str]) -> tuple[str, ...]:
    for name in names:
        kind, _, run = name.partition(":") if isinstance(name, str) else ("", "", "")
        if kind not in _KINDS or check_run(run) != run:
            raise RequestError.make(f"{name!r} is no publication", 'use "lora:<run>", "full:<run>"')
    return tuple(dict.fromkeys(names))


def _server_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise RequestError.make(f"{_shown(name)} is no name", "leave it out or give one")
    return name


def _secret(path: Any) -> str:
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise RequestError.make(f"{_shown(path)} is no absolute path", "give the whole path")
    return path


def secret_here(server: Mapping[str, Any] | None = None) -> str | None:
    """The absolute path of this process's secret, for a nixl_info.json; None: it has none.

    Does not block.

    Args:
        server: what its fanin.Server is given, whose secret_file (or tls_cert, instead of one) goes
            before FANIN_SECRET_FILE. Links stay: where secrets are mounted they lead elsewhere
            soon.
    """
    given = server or {}
    named = given.get("secret_file")
    if named is None:
        named = "" if given.get("tls_cert") else os.environ.get("FANIN_SECRET_FILE", "")
    named = os.fspath(named)
    return os.path.abspath(named) if named else None


def secret_arguments(secret_file: str | None) -> dict[str, Any]:
    """What :class:`fanin.Client` is to be given for a trainer whose nixl_info.json names a secret.

    Nothing if this process's FANIN_SECRET_FILE says which, or that there is none, or it has a
    certificate (FANIN_TLS_CERT). Does not block.
    """
    if secret_file is None or {"FANIN_SECRET_FILE", "FANIN_TLS_CERT"} & os.environ.keys():
        return {}
    return {"secret_file": secret_file}


def client_arguments(trainer: Target, given: Mapping[str, Any]) -> dict[str, Any]:
    """*given* for a :class:`fanin.Client` of *trainer*, and the secret that its file names.

    That only where neither *given* nor the environment has a secret or a certificate. Blocks and
    raises as :func:`addresses_of`.
    """
    if {"secret_file", "tls_cert"} & {name for name, value in given.items() if value is not None}:
        return dict(given)
    if (path := path_of(trainer)) is not None:
        trainer = read_info(path)
    named = trainer.secret_file if isinstance(trainer, TrainerInfo) else None
    return {**given, **secret_arguments(named)}


def _world_id(text: Any) -> str:
    good = isinstance(text, str) and len(text) == 32 and text.isascii()
    if not good or any(c not in "0123456789abcdefABCDEF" for c in text):
        raise RequestError.make(f"world id {text!r} is not 32 hex digits", "copy it whole")
    result: str = text.lower()
    if not result.strip("0"):
        raise RequestError.make("the world id is all zero", "leave it out if it is not known")
    return result


def _step(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_STEP:
        raise RequestError.make(f"{_shown(value)} is not an integer from 0 to {MAX_STEP}")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "world_id": _world_id,
    "run": check_run,
    "server_name": _server_name,
    "step": _step,
    "publications": _publications,
    "secret_file": _secret,
}
"""Of the fields of TrainerInfo: each gives the value as it is kept."""


# -------------------------------------------------------------------- reading


class _Reader:
    """Turns one parsed file into a TrainerInfo; every complaint names the file and the field."""

    def __init__(self, path: Path, root: Any) -> None:
        self.path = path
        self.root = root

    def bad(self, field: str, problem: str, rank: int | None = None) -> RequestError:
        where = f"{self.path}: {field}: " if field else f"{self.path}: "
        remedy = "it should hold host, base_port and world_size, or hosts; write it with write_info"
        return RequestError.make(where + problem, remedy, rank=rank)

    def integer(self, value: Any, field: str, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.bad(field, f"{_shown(value)} is not an integer from {low} to {high}")
        return value

    def host(self, value: Any, field: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.bad(field, "is missing" if value is None else f"{_shown(value)} is no host")
        return value

    def address(self, host: str, port: int, rank: int, field: str) -> str:
        if not 1 <= port <= 65535:
            raise self.bad(field, f"rank {rank} would listen on port {port}", rank)
        try:
            return join_address(host, port)
        except FaninError:
            raise self.bad(field, f"{_shown(host)} is no host", rank) from None

    def short(self, size: int | None) -> list[str]:
        host = self.host(self.root.get("host"), "host")
        base = self.integer(self.root.get("base_port"), "base_port", 1, 65535)
        if size is None:
            raise self.bad("world_size", "is missing")
        return [self.address(host, base + rank, rank, "base_port") for rank in range(size)]

    def long(self, hosts: list[Any], size: int | None) -> list[str]:
        total = 0
        for i, entry in enumerate(hosts):
            ranks = entry.get("ranks") if isinstance(entry, dict) else None
            if isinstance(ranks, list):
                total += len(ranks)
            else:
                total += self.integer(ranks, f"hosts[{i}].ranks", 0, MAX_RANKS)
        if size is not None and size != total:
            raise self.bad("world_size", f"is {size}, but the hosts have {total} ranks")
        if not 1 <= total <= MAX_RANKS:
            raise self.bad("hosts", f"{total} ranks, 1 to {MAX_RANKS} are possible")
        placed: dict[int, str] = {}
        following = 0
        for i, entry in enumerate(hosts):
            where = f"hosts[{i}]"
            host = self.host(entry.get("host"), where + ".host")
            base = self.integer(entry.get("base_port"), where + ".base_port", 0, 65535)
            ranks = entry["ranks"]
            if not isinstance(ranks, list):
                ranks = range(following, following + ranks)
            for rank in ranks:
                self.integer(rank, where + ".ranks", 0, total - 1)
                if rank in placed:
                    raise self.bad(where + ".ranks", f"rank {rank} is named twice", rank)
                placed[rank] = self.address(host, base + rank, rank, where)
                following = rank + 1
        return [placed[rank] for rank in range(total)]

    def field(self, field: str, value: Any) -> Any:
        """What TrainerInfo takes, of a field of the file; None: it is not there."""
        name = "run" if field == "run_idx" else field
        if field == "publications" and value is not None:
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise self.bad(field, f"{_shown(value)} is no list of names")
            value = [one for one in value if one.partition(":")[0] in _KINDS]
        if field == "step" and isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value[:21])
        try:
            return None if value is None else _CHECKS[name](value)
        except FaninError as error:
            raise self.bad(field, error.message) from None

    def read(self) -> TrainerInfo:
        if not isinstance(self.root, dict):
            raise self.bad("", "is not a JSON object")
        size = self.root.get("world_size")
        if size is not None:
            self.integer(size, "world_size", 1, MAX_RANKS)
        hosts = self.root.get("hosts")
        if hosts is not None and not isinstance(hosts, list):
            raise self.bad("hosts", "is not a list")
        addresses = self.long(hosts, size) if hosts is not None else self.short(size)
        names = ("world_id", "run_idx", "server_name", "step", "publications", "secret_file")
        said = {one: self.field(one, self.root.get(one)) for one in names}
        said["run"], said["publications"] = said.pop("run_idx"), said["publications"] or ()
        try:
            return TrainerInfo(tuple(addresses), **said)
        except FaninError as error:
            if str(self.path) in error.message:
                raise
            raise self.bad("hosts", error.message) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_info(path: str | os.PathLike[str]) -> TrainerInfo:
    """Reads a nixl_info.json; *path* is the file or the directory that holds it.

    Does not look for the marker: see :func:`wait_stable`. Blocks as long as reading takes; any
    thread.

    Raises:
        NotFoundError: there is no such file.
        HostError: the file cannot be read.
        RequestError: the file is cut off or contradicts itself; names file and field.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file /= INFO_NAME
        with open(file, "rb") as stream:
            content = stream.read(_MAX_FILE + 1)
    except FileNotFoundError:
        raise NotFoundError.make(
            f"{file}: no such file", f"check the path of {INFO_NAME}; the trainer writes it"
        ) from None
    except (OSError, ValueError) as error:
        raise HostError.make(f"{file}: {error}", f"check the path of {INFO_NAME}") from error
    if len(content) > _MAX_FILE:
        raise RequestError.make(f"{file}: larger than {_MAX_FILE} bytes", "check the path")
    try:
        root = json.loads(content.decode("utf-8"), object_pairs_hook=unique_fields)
    except (ValueError, RecursionError) as error:
        raise RequestError.make(
            f"{file}: no valid JSON: {error}", "if it was cut off, let the trainer write it again"
        ) from None
    return _Reader(file, root).read()


# -------------------------------------------------------------------- writing


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(directory: Path, content: bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path, marker = directory / INFO_NAME, directory / MARKER_NAME
    try:
        # A marker of an earlier writing must not vouch for what is written now.
        os.unlink(marker)
        _sync_directory(directory)
    except FileNotFoundError:
        pass
    write_whole(path, content)
    # The name of the file is on disk before the marker's can be, also after a power cut.
    _sync_directory(directory)
    write_synced(marker, b"")
    _sync_directory(directory)
    return path


def write_info(directory: str | os.PathLike[str], info: TrainerInfo) -> Path:
    """Writes ``nixl_info.json`` into *directory* (made if need be), then the marker ``STABLE``.

    The file appears whole, by rename; it and its name are on disk before the marker appears. A
    marker that is there already is removed first. One writer a directory at a time. Blocks until
    all is on disk; any thread. Returns the file's path. Raises RequestError if the addresses
    cannot be written (see TrainerInfo.to_json), HostError if the directory cannot be.
    """
    content = (json.dumps(info.to_json(), indent=2) + "\n").encode()
    try:
        return _write(Path(directory), content)
    except OSError as error:
        raise HostError.make(
            f"{directory}: cannot write {INFO_NAME}: {error.strerror or error}",
            "let rank 0 write to a directory that it may write to, with room",
        ) from error


def wait_stable(
    directory: str | os.PathLike[str],
    timeout: float,
    *,
    rest: Callable[[float], object] = time.sleep,
) -> TrainerInfo:
    """Waits until the trainer has finished *directory*, then reads its ``nixl_info.json``.

    Blocks at most so long (looks every 1 to 50 ms, because network filesystems tell of no changes);
    any thread. Raises PullTimeoutError saying what is not there yet, and the errors of
    :func:`read_info`.

    Args:
        directory: of the step; a path that ends in ``.json`` means the file, with the marker beside
            it.
        timeout: seconds, 0: look once.
        rest: spends so many seconds between two looks; what it raises ends the wait.
    """
    place = Path(directory)
    place = place.parent if place.suffix == ".json" else place
    file = Path(directory) if Path(directory).suffix == ".json" else place / INFO_NAME
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        missing: Path = place
        try:
            if not place.is_dir():
                raise FileNotFoundError
            missing = place / MARKER_NAME
            os.stat(missing)
            missing = file
            return read_info(file)
        except (FileNotFoundError, NotFoundError):
            # Also a marker without a file is waited for: caches of network filesystems may show
            # the newer of two names first.
            pass
        except (OSError, ValueError) as error:
            raise HostError.make(f"{missing}: {error}", "check the path") from error
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise PullTimeoutError.make(
                f"{missing} is not there after {max(timeout, 0):g} s",
                "check that the trainer runs and writes to this directory, which both must see",
            )
        rest(min(pause, remaining))
        pause = min(pause * 2, 0.05)
