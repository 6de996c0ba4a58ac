# SPDX-License-Identifier: Apache-2.0
"""The ranks of the trainer: who they are, on which hosts, and at which addresses they listen."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch

from fanin._route import route_address
from fanin.errors import FaninError, HostError, RequestError, StateError
from fanin.info import is_loopback, is_numeric

MAX_PORT = 65535


@dataclass(frozen=True)
class Report:
    """The facts that a rank tells the others before it listens.

    Args:
        error: why the rank cannot serve; None: it can.
        hostname: the rank's host.
        network: ranks with the same text reach each other by 127.0.0.1.
        local_rank: the rank's number on its host; None: not known.
        world_id: 16 bytes; rank 0's is everybody's.
        has_run: the rank names a run to begin with.
    """

    error: FaninError | None
    hostname: str
    network: str
    local_rank: int | None
    world_id: bytes
    has_run: bool = True


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """Around a collective of the trainer's ranks. StateError: it broke off."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise StateError.make(
            f"the ranks' collective broke off: {error}",
            "see which rank has ended, by its log's last lines; then start all ranks again, as "
            "their process group does not outlive one",
        ) from error


class Ranks:
    """The ranks that exchange objects: a process group, or this process alone."""

    def __init__(self, group: Any, device: int | None) -> None:
        self._group = group
        self._device = device
        self._store: Store | None = None
        dist = torch.distributed
        self._distributed = bool(dist.is_available() and dist.is_initialized())
        self.rank, self.size = 0, 1
        if self._distributed:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        elif group is not None:
            raise RequestError.make(
                "group is given, but torch.distributed is not initialised",
                "call torch.distributed.init_process_group before",
            )
        if self.rank < 0:
            raise RequestError.make(
                "this process is no rank of the group", "give a group that this process is in"
            )

    def refuse_gone(self, error: FaninError | None = None) -> None:
        """Raises if the process group was destroyed: *error*, if there is one, else StateError."""
        if self._distributed and not torch.distributed.is_initialized():
            raise error or StateError.make(
                "the ranks cannot be asked: torch.distributed's process group was destroyed",
                "call this before destroy_process_group()",
            )

    def gather(self, value: Any) -> list[Any]:
        """Everybody's values, rank by rank. Blocks until all ranks have called it."""
        if not self._distributed or self.size == 1:
            return [value]
        self.refuse_gone()
        out: list[Any] = [None] * self.size
        with self._on_device(), collective():
            torch.distributed.all_gather_object(out, value, group=self._group)
        return out

    def share(self, value: Any, rank: int) -> Any:
        """That rank's value. Blocks until it has called it, as all ranks must."""
        if not self._distributed or self.size == 1:
            return value
        dist = torch.distributed
        out = [value if rank == self.rank else None]
        source = rank if self._group is None else dist.get_global_rank(self._group, rank)
        with self._on_device(), collective():
            dist.broadcast_object_list(out, src=source, group=self._group)
        return out[0]

    def home(self, device: str) -> Any:
        """A device, of that kind if the ranks can reduce there, on which all ranks do so."""
        if self._distributed and self.size > 1:
            group = self._group or torch.distributed.group.WORLD
            try:
                group._get_backend(torch.device(device))
            except RuntimeError:
                device = "cuda"
        at = torch.device(device)
        if at.type == "cuda":
            index = torch.cuda.current_device() if self._device is None else self._device
            at = torch.device("cuda", index)
        return at

    def maximum(self, values: Any) -> Callable[[], None]:
        """Begins the MAX of all ranks' values, in place; what it returns waits for its end. Blocks
        until all ranks have called it, on a GPU only what is put on the current stream."""
        if not self._distributed or self.size == 1:
            return lambda: None
        dist = torch.distributed
        with collective():
            work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> None:
            with collective():
                work.wait()

        return wait

    def store(self) -> Store | None:
        """Where ranks leave things for others, of torch.distributed; None: there is none."""
        if self._store is not None or not self._distributed or self.size == 1:
            return self._store
        with contextlib.suppress(AttributeError, ValueError, RuntimeError):  # MPI has none
            found = torch.distributed.distributed_c10d._get_default_store()
            self._store = Store(found, self.rank)
        return self._store

    def _on_device(self) -> Any:
        # NCCL gathers objects through the current device, which must be one of this rank's own.
        if self._device is None or not torch.cuda.is_available():
            return contextlib.nullcontext()
        return torch.cuda.device(self._device)


def network_of_host() -> str:
    """Names this host's network namespace: processes with the same name share 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def report(error: FaninError | None, has_run: bool) -> Report:
    """This rank's report. The world id is drawn anew, and used if this is rank 0."""
    local = os.environ.get("LOCAL_RANK", "")
    return Report(
        error,
        socket.gethostname(),
        network_of_host(),
        int(local) if local.isdigit() else None,
        secrets.token_bytes(16),
        has_run,
    )


def raise_first(errors: Sequence[FaninError | None], rank: int, what: str) -> None:
    """On every rank: an error that names the first rank that has one, of that error's class."""
    for at, error in enumerate(errors):
        if error is None:
            continue
        if at == rank and len(errors) == 1:
            raise error
        raise type(error)(
            f"rank {at} could not {what}: {error.message}",
            code=error.code,
            remedy=error.remedy,
            key=error.key,
            rank=at,
            address=error.address,
        ) from (error if at == rank else None)


def as_fanin_error(error: Exception) -> FaninError:
    """What travels to the other ranks: an error of this package, whatever it was."""
    if isinstance(error, FaninError):
        return error
    if isinstance(error, OSError):
        return HostError.make(f"{type(error).__name__}: {error}")
    return RequestError.make(f"{type(error).__name__}: {error}")


def _networks(allow: str) -> list[str]:
    return [part.strip().split("/")[0] for part in allow.split(",") if part.strip()]


@dataclass(frozen=True)
class Listening:
    """How this rank is to listen."""

    bind: str
    advertise: str
    open: bool


def choose_addresses(
    reports: Sequence[Report], bind: str | None, advertise: str | None, allow: str | None
) -> Listening:
    """Where to listen and what to tell the engines.

    Without anything given a world of one host listens on 127.0.0.1. RequestError: several hosts
    and no allow-list, or an address that other hosts cannot reach.
    """
    for key, given in (("bind", bind), ("advertise", advertise), ("allow", allow)):
        if given is not None and not isinstance(given, str):
            remedy = 'give a text: "10.0.0.1"; of allow: networks with commas, "10.0.0.0/8"'
            raise RequestError.make(f"{key} is {given!r}", remedy, key=key)
    hosts = sorted({item.hostname for item in reports})
    several = len({item.network for item in reports}) > 1
    listed = ", ".join(hosts)
    if several and advertise is not None and is_loopback(advertise):
        raise RequestError.make(
            f"advertise is {advertise}, which only this host can reach, and the world spans "
            f"several hosts ({listed})",
            "advertise each host's own address, or leave advertise out",
            address=advertise,
        )
    if several and bind is not None and is_loopback(bind):
        raise RequestError.make(
            f"bind is {bind}, which only this host can reach, and the world spans several hosts "
            f"({listed})",
            "bind each host's own address, or leave bind out",
            address=bind,
        )
    wanted = several or allow is not None
    if bind is None and advertise is not None and is_numeric(advertise):
        bind = advertise
    if bind is None and (wanted or advertise is not None):
        targets = [os.environ.get("MASTER_ADDR", ""), *_networks(allow or ""), "192.0.2.1"]
        bind = route_address([target for target in targets if target])
        if bind is None:
            raise RequestError.make(
                "this host's address for others is not found out",
                "give bind= and advertise= with it",
            )
    if bind is None:
        bind = "127.0.0.1"
    open_server = not is_loopback(bind)
    if open_server and allow is None:
        where = f"the world spans several hosts ({listed})" if several else f"bind is {bind}"
        raise RequestError.make(
            f"{where}, and nothing says who may read the weights",
            "give allow=, the networks of the inference workers: allow='10.0.0.0/8'",
        )
    return Listening(bind, advertise or bind, open_server)


def base_port_for(reports: Sequence[Report], rank: int, base_port: int, port_by: str) -> int:
    """The base port to give the server, which listens on it plus its rank. 0: any free port.

    ``port_by`` "global": base_port + rank; "local": base_port + the rank on its host (LOCAL_RANK
    where all ranks have it, else counted). RequestError: there is no such port.
    """
    if port_by not in ("global", "local"):
        raise RequestError.make(f"port_by is {port_by!r}", "give 'global' or 'local'")
    if not isinstance(base_port, int) or not 0 <= base_port <= MAX_PORT:
        raise RequestError.make(f"base_port is {base_port!r}", "give a port, or 0 for any")
    if base_port == 0:
        return 0
    if port_by == "global":
        last, base = base_port + len(reports) - 1, base_port
    else:
        here = reports[rank].network
        given = reports[rank].local_rank
        if given is None or any(item.local_rank is None for item in reports):
            given = sum(1 for item in reports[:rank] if item.network == here)
        last, base = base_port + given, base_port + given - rank
    if last > MAX_PORT or base < 1:
        raise RequestError.make(
            f"ports from {base_port} on do not do for rank {rank} of {len(reports)}",
            f"give a base_port above {len(reports)} and below {MAX_PORT - len(reports)}, or 0",
        )
    return base


# ------------------------------------------------------------------------------------- the store


_log = logging.getLogger("fanin.torch")

_WAIT = 600.0
"""Seconds for an answer."""
_QUIET = 10.0
"""Seconds after which the log says who does not answer."""

_Asked = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Store:
    """Asks the store in a thread of its own: PyTorch waits without an end where the process that
    keeps the store stands still. Any thread may call any method, and all raise RuntimeError."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._asked: SimpleQueue[_Asked] = SimpleQueue()
        self._silent: Future[Any] | None = None
        """What has got no answer in time."""
        asks = threading.Thread(target=_answer, args=(self._asked,), daemon=True)
        asks.name = "fanin-store"
        asks.start()

    def set(self, key: str, value: Any) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> Any:
        return self._ask(self._store.get, key)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        return self._ask(self._store.compare_set, key, expected, desired)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(self._store.add, key, amount))

    def check(self, keys: list[str]) -> Any:
        return self._ask(self._store.check, keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._ask(self._store.wait, keys, timeout)

    def delete_key(self, key: str) -> Any:
        return self._ask(self._store.delete_key, key)

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._silent is not None and not self._silent.done():
            raise RuntimeError("it is silent")
        answer: Future[Any] = Future()
        self._asked.put((answer, call, arguments))
        try:
            return answer.result(_QUIET)
        except NotYet:
            _log.warning(
                "fanin: rank %d waits for torch.distributed's store to answer, %.0f s more at most:"
                " see whether the process that keeps it stands still (MASTER_ADDR, mostly rank 0)",
                *(self._rank, _WAIT - _QUIET),
            )
        try:
            return answer.result(_WAIT - _QUIET)
        except NotYet:
            self._silent = answer
            raise RuntimeError(f"nothing came in {_WAIT:.0f} s") from None


def _answer(asked: SimpleQueue[_Asked]) -> None:
    while True:
        answer, call, arguments = asked.get()
        try:
            answer.set_result(call(*arguments))
        except BaseException as error:  # it is the caller's
            answer.set_exception(error)
        del answer, call, arguments
