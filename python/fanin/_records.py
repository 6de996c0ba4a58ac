# SPDX-License-Identifier: Apache-2.0
"""What a client tells of a trainer and of its pulls: the C library's structures as dataclasses."""

from __future__ import annotations

import ctypes
import json
import struct
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from . import _ffi
from ._dtypes import DTYPES
from ._library import text
from .errors import status_name

DELTAS = "deltas"
"""The pair of a publication's metadata that says how many patches its ranks keep."""

_Record = TypeVar("_Record")
_DTYPE_NAMES = {code: name for name, code in DTYPES.items()}


@dataclass(frozen=True)
class PullResult:
    """What a pull did. Times are in seconds."""

    step: int
    #: 32 hexadecimal digits.
    world_id: str
    #: Of tensor data.
    bytes: int
    #: Filled or written.
    tensors: int
    #: Read requests or one-sided gets.
    reads: int
    #: Attempts that were begun again.
    restarts: int
    #: Of them, those that were overtaken by an update.
    stale: int
    #: The directory was there already, and no rank was read.
    reused: bool
    #: Of most bytes: "stream", "cma", "rdma", "cuda_ipc".
    path: str
    #: Why this path.
    path_reason: str
    connect: float
    catalog: float
    plan: float
    wait: float
    begin: float
    read: float
    scatter: float
    end: float
    write: float
    #: The whole call.
    total: float
    #: The total, minus first read asked for to last byte in place.
    fixed: float
    #: Opening other processes' CUDA memory; part of *connect*.
    map: float
    #: Making copy tables on devices; part of *plan*.
    table: float
    #: True: what came over a network came with checksums, which fit. False: some of it had none
    #: (also of a directory that was there already). "local": nothing came over a network.
    transport_checksums: bool | str = False
    #: The ranks' digests are those of what has landed, and what comparing them took.
    verified: bool = False
    verify: float = 0.0
    #: With ``deltas`` and no *whole_because*: the step that the memory held, to which patches were
    #: applied. Otherwise 0.
    base_step: int = 0
    #: Of the patches that were read, their directories included, in all attempts.
    patch_bytes: int = 0
    #: Applying patches.
    apply: float = 0.0
    #: Why a pull with ``deltas`` read the whole; "": it read patches, or was without.
    whole_because: str = ""
    #: For each rank: rank, address, path, reason, bytes, reads, read_ns, connections, checksums.
    ranks: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class RankInfo:
    """A rank as it was last seen."""

    #: None: never answered.
    rank: int | None
    #: 0: never answered.
    world_size: int
    address: str
    #: "<name>_<rank>"; "" if it never answered.
    server_name: str
    #: 32 hexadecimal digits.
    world_id: str
    #: 32 hexadecimal digits, new with every life of the rank's server.
    incarnation: str
    #: Library version of the rank.
    software: str
    #: "" without UCX.
    ucx_version: str
    #: Whether it is connected.
    connected: bool
    #: Name of the code that says why it is not ("FANIN_ERR_UNREACHABLE"), "" if it is.
    status: str
    #: Why it is not connected, "" if it is.
    message: str
    #: It is not connected because it refused nothing and said nothing in time.
    silent: bool


@dataclass(frozen=True)
class PublicationInfo:
    """A publication as one rank sees it."""

    #: "lora:<run>".
    name: str
    rank: int
    #: "unpublished", "stable", "draining", "writing" or "paused".
    state: str
    #: Last committed.
    step: int
    epoch: int
    catalog_version: int
    #: Held by this rank.
    tensors: int
    #: Held by this rank.
    bytes: int
    #: 32 hexadecimal digits.
    key_digest: str
    #: Seconds since it has this state, or since the commit that renewed it; None: not known.
    state_age: float | None
    #: Seconds since the last commit; None: not known, or there was none.
    commit_age: float | None


@dataclass(frozen=True)
class Owner:
    """A box that one rank holds; *offset* and *extent* in elements of the whole tensor."""

    rank: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    bytes: int
    #: Number in the rank's region table.
    region: int
    #: Bytes.
    region_offset: int
    packed: bool


@dataclass(frozen=True)
class Entry:
    """A tensor of a publication and the ranks that hold it."""

    name: str
    #: safetensors' name: "BF16".
    dtype: str
    shape: tuple[int, ...]
    #: Of the whole tensor.
    bytes: int
    owners: tuple[Owner, ...]


@dataclass(frozen=True)
class WatchEvent:
    """A step that all ranks have committed."""

    step: int
    #: Of the rank that is furthest.
    step_newest: int
    #: Seconds between the first and the last rank's commit of *step*.
    spread: float
    #: None: not known.
    slowest_rank: int | None


@dataclass(frozen=True)
class RankState:
    """What one rank is doing with a run."""

    rank: int
    address: str
    #: As of :class:`PublicationInfo`.
    state: str
    #: Last committed; 0: none.
    step: int
    #: Seconds since it has this state; None: not known.
    state_age: float | None


@dataclass(frozen=True)
class RankProgress:
    """What one rank has brought to a pull that is under way; as text a line for a log."""

    rank: int
    address: str
    #: As of :class:`PullResult`.
    path: str
    #: Of *bytes_total*, what the pull reads from it.
    bytes_done: int
    bytes_total: int
    #: Seconds for which it has owed bytes that it was asked for, and brought none; 0: it owes none.
    quiet: float

    def __str__(self) -> str:
        done, total = self.bytes_done / 1e6, self.bytes_total / 1e6
        silence = f", no byte for {int(self.quiet)} s" if self.quiet >= 1 else ""
        return f"rank {self.rank} {self.address}: {done:.1f} of {total:.1f} MB{silence}"


@dataclass(frozen=True)
class PullProgress:
    """How far a pull is, and by whom; as text a line for a log."""

    bytes_done: int
    bytes_total: int
    #: Those that it reads from.
    ranks: tuple[RankProgress, ...]
    #: The one of them that it waits for, quiet for longest and for a second at least.
    slowest: RankProgress | None

    def __str__(self) -> str:
        waits = f"; waits for {self.slowest}" if self.slowest else ""
        return f"{self.bytes_done / 1e6:.1f} of {self.bytes_total / 1e6:.1f} MB{waits}"


# ---------------------------------------------------------------------------------- structures


_CHECKSUMS: tuple[bool | str, ...] = (False, True, "local")


def _made(kind: type[_Record], info: ctypes.Structure, **own: Any) -> _Record:
    """*kind* of the members that have its fields' names; own: fields that are made otherwise."""
    members = {field[0] for field in info._fields_}
    for name in (one.name for one in fields(kind)):  # type: ignore[arg-type]
        if name in own:
            continue
        value = getattr(info, name if name in members else f"{name}_ns")
        if name not in members:
            value /= 1e9
        elif isinstance(value, ctypes.Array):
            value = bytes(value).hex()
        elif value is None or isinstance(value, bytes):
            value = text(value)
        own[name] = value
    return kind(**own)


def pull_result(lib: ctypes.CDLL, result: ctypes.c_void_p) -> PullResult:
    info = _ffi.ResultInfo()
    info.struct_size = ctypes.sizeof(info)
    lib.fanin_result_get(result, ctypes.byref(info))
    return _made(
        PullResult,
        info,
        path=text(lib.fanin_path_name(info.path)),
        transport_checksums=_CHECKSUMS[info.transport_checksums],
        ranks=json.loads(text(info.ranks_json) or "[]"),
    )


def rank_info(info: _ffi.RankInfo) -> RankInfo:
    well = info.status == _ffi.OK
    status = "" if well else status_name(info.status)
    rank = info.rank if info.rank >= 0 else None
    return _made(RankInfo, info, rank=rank, connected=well, status=status)


def _state(number: int) -> str:
    states = _ffi.PUBLICATION_STATES
    return states[number] if 0 <= number < len(states) else f"state {number}"


def _age(ms: int) -> float | None:
    return ms / 1e3 if ms else None


def publication_info(info: _ffi.PublicationInfo) -> PublicationInfo:
    ages = {"state_age": _age(info.state_age_ms), "commit_age": _age(info.commit_age_ms)}
    return _made(PublicationInfo, info, state=_state(info.state), **ages)


# struct_size, name, dtype, n_dims, shape, bytes, owners, n_owners
ENTRY = struct.Struct(f"@NPiI{_ffi.MAX_DIMS}QQPN")
# rank, offset and extent, bytes, region, region_offset, packed
OWNER = struct.Struct(f"@I{2 * _ffi.MAX_DIMS}QQIQ?0Q")


def entry_at(address: int, with_owners: bool = True) -> Entry:
    """The ``fanin_entry`` there, copied."""
    _, name, dtype, dims, *shape, size, owners, n_owners = ENTRY.unpack(
        ctypes.string_at(address, ENTRY.size)
    )
    if not with_owners:
        n_owners = 0
    held = OWNER.iter_unpack(ctypes.string_at(owners, n_owners * OWNER.size) if n_owners else b"")
    return Entry(
        text(ctypes.string_at(name)),
        _DTYPE_NAMES.get(dtype, f"dtype {dtype}"),
        tuple(shape[:dims]),
        size,
        tuple([_owner(owner, dims) for owner in held]),
    )


def _owner(owner: tuple[Any, ...], dims: int) -> Owner:
    middle = 1 + _ffi.MAX_DIMS
    return Owner(owner[0], owner[1 : 1 + dims], owner[middle : middle + dims], *owner[-4:])


def watch_event(event: _ffi.WatchEvent) -> WatchEvent:
    slowest = event.slowest_rank if event.slowest_rank >= 0 else None
    return _made(WatchEvent, event, slowest_rank=slowest)


def rank_state(state: _ffi.RankState) -> RankState:
    age = _age(state.state_age_ms)
    return _made(RankState, state, state=_state(state.state), state_age=age)


def pull_progress(lib: ctypes.CDLL, progress: _ffi.PullProgress) -> PullProgress:
    def one(of: _ffi.RankProgress) -> RankProgress:
        path = text(lib.fanin_path_name(of.path))
        return _made(RankProgress, of, path=path, quiet=of.quiet_ms / 1e3)

    ranks = tuple(one(progress.ranks[i].contents) for i in range(progress.n_ranks))
    slowest = one(progress.slowest.contents) if progress.slowest else None
    return _made(PullProgress, progress, ranks=ranks, slowest=slowest)
